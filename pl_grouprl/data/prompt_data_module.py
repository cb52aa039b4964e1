"""The LightningDataModule with prompts for training, validation and test."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from pl_grouprl.chat.format import EncodeImages
from pl_grouprl.data.encoding import (
    ChatOptions,
    EncodingOptions,
    KeptPrompts,
    LengthPolicy,
    OverlongPrompts,
    encode_rows,
)
from pl_grouprl.data.loaders import EvalPromptLoader, LevelPromptLoader, LevelSchedule, TrainPromptLoader
from pl_grouprl.data.rows import PromptSource, digest_rows, plain, read_source
from pl_grouprl.media.rows import encode_images, load_processor, reads_media
from pl_grouprl.types import Prompt
from pl_grouprl.utilities.distributed import gather_plain, raise_on_all_ranks
from pl_grouprl.utilities.options import check_options

_SPLITS_OF_STAGE = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}


class PromptDataModule(LightningDataModule):
    """Prompts from files, data sets in memory, or built-in tasks.

    Supports two sets of columns. TRL's: `prompt`, a string or messages; every other column is passed to the reward
    functions. verl's: `prompt` as messages, `data_source` (under which validation metrics are reported), `reward_model`
    with `ground_truth`, `extra_info`. Prompts are tokenized once, at setup, so a bad row fails before any training
    step.

    Images and videos are in the columns `images` and `videos`: lists of PIL images, paths, or dictionaries with `bytes`
    or `path`; a video may be a list of frames. Their places in messages are parts `{"type": "image"}`, or tags
    `<image>` and `<video>` in the text; without any they come first. Setup opens files and counts places; images are
    decoded and processed when their prompt is sampled, and not kept. (`max_prompt_length` requires processing every row
    once at setup, to count tokens.)

    In training each batch of prompts is repeated `updates_per_rollout` times, an attribute of the LightningModule (1 by
    default). Batches are `PromptBatch` objects.

    Args:
        train: A path to a .jsonl, .json or .parquet file, a pattern with *, a list of these; an object with
            `rows(split)`; or rows in memory (a list of dictionaries, a `datasets.Dataset`). Not needed if an
            environment writes the prompts (its `reset` returns them).
        val: The same, for validation; no validation if None.
        test: The same, for the test stage. The predict stage uses it too, or `val` if it is None.
        steps_per_epoch: Number of batches of prompts in an epoch, if an environment writes them; only without `train`,
            and then 1 by default.
        batch_size: Prompts per rollout, over all ranks (verl's `train_batch_size`); not necessarily a multiple of the
            number of ranks.
        val_batch_size: Maximum number of prompts in a validation or test batch, over all ranks.
        prompt_column: Column of the prompt.
        image_column: Column with one or several images. Rows without `images` may have `image` (TRL).
        video_column: Column with one or several videos. Rows without `videos` may have `video`.
        max_prompt_length: Maximum prompt length in tokens, including template, images and videos; no limit if None.
        overlong_prompts: How to treat longer prompts: `drop` skips them, `truncate` keeps their last
            `max_prompt_length` tokens (an error with images), `error` raises an error. The counts are printed at the
            start and logged as `data/...`. Both options may change when a run is resumed.
        max_dropped_share: Maximum fraction of a split's prompts that `drop` may skip, from 0 to 1; more is an error.
        add_special_tokens: Begin string prompts with the tokenizer's special tokens, such as BOS, unless they have
            them. (For messages the chat template writes them.) Tokens after a text, such as EOS, are never added.
        split_special_tokens: Encode control tokens in the text of messages, observations, and tools' descriptions and
            results as text, so that only the chat template begins and ends turns. String prompts keep theirs.
        chat_template_kwargs: Passed to the tokenizer's `apply_chat_template`, for example `enable_thinking: false`.
        shuffle: Draw a new order of the training prompts in each epoch, from `seed` and the epoch's number.
        seed: Determines the orders.
        drop_last: Skip the training prompts of an epoch that do not fill a batch; with `shuffle`, different ones in
            each epoch.
        tokenizer: A transformers tokenizer, or the path or name of one; by default the LightningModule's `tokenizer`.
        processor: A transformers processor, or the path or name of one, for images and videos; defaults to the
            policy's, loaded if a row has any or the policy reads them.
        processor_kwargs: Passed to the processor, for example `images_kwargs: {size: {longest_edge: 802816}}`.
    """

    def __init__(
        self,
        train: str | list[str] | PromptSource | Sequence[dict[str, Any]] | None = None,
        val: str | list[str] | PromptSource | Sequence[dict[str, Any]] | None = None,
        test: str | list[str] | PromptSource | Sequence[dict[str, Any]] | None = None,
        *,
        steps_per_epoch: int | None = None,
        batch_size: int = 8,
        val_batch_size: int = 64,
        prompt_column: str = "prompt",
        image_column: str = "images",
        video_column: str = "videos",
        max_prompt_length: int | None = None,
        overlong_prompts: OverlongPrompts = "drop",
        max_dropped_share: float = 0.9,
        add_special_tokens: bool = True,
        split_special_tokens: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
        tokenizer: Any = None,
        processor: Any = None,
        processor_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        in_range = steps_per_epoch is None or (steps_per_epoch >= 1 and train is None)
        check_options(
            {
                "PromptDataModule.steps_per_epoch": (steps_per_epoch, in_range, "at least 1, and None with train"),
                "PromptDataModule.batch_size": (batch_size, batch_size >= 1, "at least 1"),
                "PromptDataModule.val_batch_size": (val_batch_size, val_batch_size >= 1, "at least 1"),
                "PromptDataModule.seed": (seed, seed >= 0, "0 or larger"),
            }
        )
        self.sources = {"train": train, "val": val, "test": test}
        self.steps_per_epoch = steps_per_epoch or 1
        self.batch_size = batch_size
        self.val_batch_size = val_batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.tokenizer = tokenizer
        self.processor = processor
        self.encoding = EncodingOptions(
            prompt_column=prompt_column,
            add_special_tokens=add_special_tokens,
            split_special_tokens=split_special_tokens,
            chat_template_kwargs=chat_template_kwargs or {},
            image_column=image_column,
            video_column=video_column,
            processor_kwargs=processor_kwargs or {},
        )
        self.length_policy = LengthPolicy(max_prompt_length, overlong_prompts, max_dropped_share)
        self.prompts: dict[str, list[Prompt]] = {}
        self.kept: dict[str, KeptPrompts] = {}
        self._digest = ""
        self._train_loader: TrainPromptLoader | None = None
        self._levels: dict[str, Any] = {}

    def setup(self, stage: str) -> None:
        """Read and tokenize a stage's data (once), and print how many prompts are used.

        Raises:
            ValueError: If the data is missing, malformed, empty, too small for a batch, or not the same on all ranks.
            FileNotFoundError: If a path matches no file.
            RuntimeError: If this failed on another rank.
        """
        device = getattr(getattr(self.trainer, "strategy", None), "root_device", "cpu")
        raise_on_all_ranks(lambda: self._set_up(stage), device)
        # Ranks with different rows would deadlock.
        facts = {split: kept.num_rows for split, kept in self.kept.items()} | self.resume_facts()
        for rank, theirs in enumerate(gather_plain(facts, device)):
            for name in (name for name in facts if theirs.get(name) != facts[name]):
                values = f"{name} is {facts[name]!r} here and {theirs.get(name)!r} on rank {rank}"
                raise ValueError(f"PromptDataModule: {values}; all ranks must read the same rows.")

    def _set_up(self, stage: str) -> None:
        splits = (self._predicted(),) if stage == "predict" else _SPLITS_OF_STAGE[stage]
        if splits and self._source(splits[0]) is None:
            raise ValueError(f"PromptDataModule(`{splits[0]}`) is None, and this stage needs it; pass a data set.")
        for split in splits:
            if self._source(split) is None or split in self.prompts:
                continue
            rows = read_source(self._source(split), split)
            if split == "train":
                self._digest = digest_rows(rows)
            tokenizer = self._tokenizer()
            if self.processor is None:
                media = reads_media(getattr(self._module(), "policy_source", None))
            else:
                media = self._processor() is not None  # raises if a named processor cannot be loaded
            prompts = encode_rows(rows, tokenizer, self.encoding, self._processor, media, self._chat())
            self.kept[split] = self.length_policy.apply(prompts, split, tokenizer)
            self.prompts[split] = self.kept[split].prompts
        if "train" in splits:
            self._levels = {}  # of an earlier fit
            self.train_dataloader()  # runs its checks before anything else
        for split in (split for split in splits if split in self.kept):
            left_out = len(self.prompts[split]) % self.batch_size if split == "train" and self.drop_last else 0
            rank_zero_info(self.kept[split].describe(split, self.length_policy.max_prompt_length, left_out))

    def train_dataloader(self) -> TrainPromptLoader:
        """Return the loader of the training prompts, which saves its epoch and position."""
        kept = self.kept["train"]
        loader: Any = LevelPromptLoader if self._levels else TrainPromptLoader
        self._train_loader = loader(
            self.prompts["train"],
            batch_size=self.batch_size,
            updates_per_rollout=getattr(self._module(), "updates_per_rollout", 1),
            shuffle=self.shuffle and not getattr(self.trainer, "overfit_batches", 0),
            seed=self.seed,
            drop_last=self.drop_last,
            rows=kept.rows,
            num_rows=kept.num_rows,
            **self._ranks(),
            **self._levels,
        )
        return self._train_loader

    def train_by_level(self, schedule: LevelSchedule, column: str) -> int:
        """Train on prompts of one level at a time from now on; see `pl_grouprl.callbacks.Curriculum`.

        Args:
            schedule: The level of each rollout.
            column: Column of the level.

        Returns:
            The number of levels.

        Raises:
            ValueError: If a row has no level, or a level has too few rows.
        """
        self._levels = {"schedule": schedule, "column": column}
        loader = self.train_dataloader()
        assert isinstance(loader, LevelPromptLoader)
        return loader.num_levels

    def resume_facts(self) -> dict[str, Any]:
        """Facts that a resumed run must share, as plain values: the training rows, their batches and encoding.

        Rows are those before the length policy, so `max_prompt_length` and `overlong_prompts` may change. Empty until
        the training data is loaded.
        """
        if "train" not in self.prompts:
            return {}
        encoding = {name: plain(value) for name, value in vars(self.encoding).items()}
        template = getattr(self._tokenizer(), "chat_template", None)
        return encoding | {
            "train": self._digest,
            "num_rows": self.kept["train"].num_rows,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
            "chat_template": hashlib.sha256(repr(template).encode("utf-8", "replace")).hexdigest(),
        }

    def metrics(self) -> dict[str, float]:
        """Numbers of dropped and truncated training and validation prompts, by metric name."""
        counts = {}
        for split, prefix in (("train", "data/"), ("val", "data/val_")):
            if split in self.kept:
                counts[f"{prefix}dropped_prompts"] = float(self.kept[split].num_dropped)
                counts[f"{prefix}truncated_prompts"] = float(self.kept[split].num_truncated)
        return counts

    def peek(self, rollout_number: int) -> list[Prompt]:
        """Return this rank's training prompts of a past or future rollout, without changing the position."""
        return self._loader().peek(rollout_number)

    def draw_extra(self, count: int, *, rollout_number: int, attempt: int = 0) -> list[Prompt]:
        """Draw additional training prompts of this rank for a rollout; see `TrainPromptLoader.draw_extra`.

        Args:
            count: Prompts for all ranks.
            rollout_number: The rollout.
            attempt: Number of the draw for this rollout, from 0.

        Returns:
            This rank's share of `count` prompts, or of all if there are fewer.
        """
        return self._loader().draw_extra(count, rollout_number=rollout_number, attempt=attempt)

    def val_dataloader(self) -> EvalPromptLoader | list[EvalPromptLoader]:
        """Return the loader of the validation prompts; an empty list, which Lightning skips, if there are none."""
        return self._eval_loader("val") if "val" in self.prompts else []

    def test_dataloader(self) -> EvalPromptLoader:
        """Return the loader of the test prompts."""
        return self._eval_loader("test")

    def predict_dataloader(self) -> EvalPromptLoader:
        """Return the loader for prediction: the test prompts, or `val`'s if there are none."""
        return self._eval_loader(self._predicted())

    def _predicted(self) -> str:
        return "test" if self.sources["test"] is not None else "val"

    def _eval_loader(self, split: str) -> EvalPromptLoader:
        return EvalPromptLoader(self.prompts[split], batch_size=self.val_batch_size, **self._ranks())

    @property
    def num_train_batches(self) -> int:
        """Batches per epoch, counting repeated batches each time."""
        return len(self._loader())

    def _loader(self) -> TrainPromptLoader:
        """The loader that training reads; outside a run, a fresh one."""
        return self._train_loader or self.train_dataloader()

    def _chat(self) -> ChatOptions:
        """The LightningModule's requirements on conversations."""
        options: ChatOptions = getattr(getattr(self._module(), "tooling", None), "chat_options", ChatOptions())
        return options

    def _source(self, split: str) -> Any:
        """Return the source of a split; without training data, rows that an environment fills."""
        source = self.sources[split]
        if split == "train" and source is None and self._chat().writes_data:
            return [{} for _ in range(self.steps_per_epoch * self.batch_size)]
        return source

    def _tokenizer(self) -> Any:
        """Return the tokenizer that was passed, or the LightningModule's."""
        if isinstance(self.tokenizer, str):
            from transformers import AutoTokenizer

            self.tokenizer = AutoTokenizer.from_pretrained(self.tokenizer)
        tokenizer = self.tokenizer if self.tokenizer is not None else getattr(self._module(), "tokenizer", None)
        if tokenizer is None:
            raise ValueError("PromptDataModule.tokenizer is None and there is no LightningModule with one; pass one.")
        return tokenizer

    def _processor(self) -> Any:
        """Return the processor that was passed, or that of the LightningModule's policy."""
        if self.processor is None or isinstance(self.processor, str):
            source = self.processor or getattr(self._module(), "policy_source", None)
            self.processor = load_processor(source)
        return self.processor

    def image_encoder(self) -> EncodeImages | None:
        """What encodes images that tools return, with its own copy of the processor; None if the policy reads text."""
        if self.processor is None and not reads_media(getattr(self._module(), "policy_source", None)):
            return None
        load = cache(lambda: copy.deepcopy(self._processor()))
        return partial(encode_images, load, self.encoding.processor_kwargs)

    def _module(self) -> Any:
        return getattr(self.trainer, "lightning_module", None)

    def _ranks(self) -> dict[str, int]:
        """Return number and rank of the processes that share the data, from the Trainer's strategy."""
        kwargs = getattr(self.trainer, "distributed_sampler_kwargs", None) or {}
        return {"num_replicas": kwargs.get("num_replicas", 1), "rank": kwargs.get("rank", 0)}
