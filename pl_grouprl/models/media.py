"""Moved to `pl_grouprl.media`."""

from pl_grouprl.utilities.moved import moved

__getattr__ = moved(
    __name__,
    {
        "language_model_class": "pl_grouprl.media.processor.language_model_class",
        "load_processor": "pl_grouprl.media.processor.load_processor",
        "media_position_ids": "pl_grouprl.media.positions.media_position_ids",
        "placeholder_ids": "pl_grouprl.media.inputs.placeholder_ids",
        "reads_media": "pl_grouprl.media.processor.reads_media",
    },
)
