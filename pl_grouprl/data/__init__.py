"""Prompts: files and built-in tasks, the data module, and its batches."""

from pl_grouprl.data.loaders import EvalPromptLoader, PromptBatch, TrainPromptLoader
from pl_grouprl.data.prompt_data_module import PromptDataModule
from pl_grouprl.data.sources import PromptSource
from pl_grouprl.data.tasks import MostFrequentDigit

__all__ = [
    "EvalPromptLoader",
    "MostFrequentDigit",
    "PromptBatch",
    "PromptDataModule",
    "PromptSource",
    "TrainPromptLoader",
]
