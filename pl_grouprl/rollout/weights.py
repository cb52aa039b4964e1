"""Moved to `pl_grouprl.sync`."""

from pl_grouprl.utilities.moved import moved

__getattr__ = moved(
    __name__,
    {"buckets": "pl_grouprl.sync.transfer.buckets", "checksum": "pl_grouprl.sync.checksum.checksum"},
)
