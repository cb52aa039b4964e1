"""Prompts: files, the data module, and its batches."""

from pl_grouprl.data.hub import HubDataset
from pl_grouprl.data.loaders import EvalPromptLoader, PromptBatch, TrainPromptLoader
from pl_grouprl.data.prompt_data_module import PromptDataModule
from pl_grouprl.data.rows import PromptSource

__all__ = ["EvalPromptLoader", "HubDataset", "PromptBatch", "PromptDataModule", "PromptSource", "TrainPromptLoader"]
