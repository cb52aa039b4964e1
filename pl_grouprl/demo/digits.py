"""Built-in task: find the most frequent digit in a long prompt. Generated with NumPy, without a download."""

from __future__ import annotations

import string
from typing import Any

import numpy as np

from pl_grouprl.utilities.arguments import checked_arguments

DIGIT_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

PAD_TOKEN, END_TOKEN = "<pad>", "<end>"
_VOCABULARY = (PAD_TOKEN, END_TOKEN, *string.digits, *sorted(set("".join(DIGIT_NAMES))))
_IDS = {token: index for index, token in enumerate(_VOCABULARY)}

# A checksum modulo 8 decides a prompt's split, so no prompt is in two splits.
_CHECKSUMS = {"train": (0, 1, 2, 3, 4, 5), "val": (6,), "test": (7,)}
_STREAMS = {"train": 0, "val": 1, "test": 2, "demonstrations": 3}
_MAX_ROUNDS = 200


def digit_tokenizer() -> Any:
    """Build the tokenizer of the task: one token per character, an end token, a padding token.

    Returns:
        A `PreTrainedTokenizerFast`; `AutoTokenizer` loads what its `save_pretrained` writes.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel(_IDS, unk_token=PAD_TOKEN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        clean_up_tokenization_spaces=False,
    )


@checked_arguments
class MostFrequentDigit:
    """Prompts of random digits; the answer is the most frequent one, written as an English word.

    The answer is spelled letter by letter, followed by the end token. In each prompt one digit takes exactly
    `majority_share` of the places; the other nine share the rest at random, each strictly less often, so there are no
    ties. Uniform digits would have margins of only a few counts out of hundreds.

    The same arguments give the same data. No prompt occurs in two splits; demonstrations use prompts of the training
    split.

    Args:
        prompt_length: Digits per prompt.
        majority_share: Fraction of the digits that are the answer; each other digit has (1 - share) / 9 on average.
            Smaller is harder.
        train_size: Rows of split `train`.
        val_size: Rows of split `val`.
        test_size: Rows of split `test`.
        label_noise: Average fraction of demonstrations with a wrong answer.
        seed: Determines all data.
    """

    def __init__(
        self,
        prompt_length: int = 512,
        majority_share: float = 0.3,
        train_size: int = 4096,
        val_size: int = 256,
        test_size: int = 256,
        label_noise: float = 0.6,
        seed: int = 0,
    ) -> None:
        if prompt_length < 1:
            raise ValueError(f"MostFrequentDigit.prompt_length is {prompt_length}; it must be at least 1.")
        for name, share in (("majority_share", majority_share), ("label_noise", label_noise)):
            if not 0 <= share <= 1:
                raise ValueError(f"MostFrequentDigit.{name} is {share}; it must be in [0, 1].")
        self.prompt_length = prompt_length
        self.majority_share = majority_share
        self.sizes = {"train": train_size, "val": val_size, "test": test_size}
        self.label_noise = label_noise
        self.seed = seed
        self._majority_count = max(1, round(majority_share * prompt_length))

    def rows(self, split: str) -> list[dict[str, Any]]:
        """Return the rows of a split, with the columns `prompt`, `answer` and `data_source`.

        Args:
            split: `train`, `val` or `test`.
        """
        if split not in self.sizes:
            raise ValueError(f"MostFrequentDigit has no split {split!r}; it has {sorted(self.sizes)}.")
        rng = np.random.default_rng((self.seed, _STREAMS[split]))
        digits_BP, answers_B = self._draw(rng, self.sizes[split], _CHECKSUMS[split])
        prompts = (digits_BP + ord("0")).astype(np.uint8)
        return [
            {
                "prompt": row.tobytes().decode("ascii"),
                "answer": DIGIT_NAMES[answer],
                "data_source": "most_frequent_digit",
            }
            for row, answer in zip(prompts, answers_B, strict=True)
        ]

    def demonstrations(
        self, count: int, seed: int = 0, *, label_noise: float | None = None
    ) -> list[tuple[list[int], list[int]]]:
        """Return prompts with completions to imitate, some of which are wrong.

        Args:
            count: Number of demonstrations.
            seed: Determines them, together with the task's seed.
            label_noise: Probability of a wrong digit's name. By default the task's.

        Returns:
            Pairs (prompt ids, completion ids); completions include the end token.
        """
        noise = self.label_noise if label_noise is None else label_noise
        rng = np.random.default_rng((self.seed, _STREAMS["demonstrations"], seed))
        digits_BP, answers_B = self._draw(rng, count, _CHECKSUMS["train"])
        wrong_B = rng.random(count) < noise
        shown_B = np.where(wrong_B, (answers_B + rng.integers(1, 10, count)) % 10, answers_B)
        completions = [[_IDS[letter] for letter in name] + [_IDS[END_TOKEN]] for name in DIGIT_NAMES]
        prompt_ids = (digits_BP + _IDS["0"]).tolist()
        return [(ids, list(completions[shown])) for ids, shown in zip(prompt_ids, shown_B, strict=True)]

    def tokenizer(self) -> Any:
        """Return the tokenizer of the task."""
        return digit_tokenizer()

    def _draw(self, rng: np.random.Generator, count: int, checksums: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Draw prompts until enough have no tie and belong to the split.

        Returns:
            Digits, shape [count, prompt_length], and answers, shape [count], both int64.

        Raises:
            ValueError: If such prompts are too rare.
        """
        kept: list[tuple[np.ndarray, np.ndarray]] = []
        missing = count
        for _ in range(_MAX_ROUNDS):
            if missing <= 0:
                break
            digits_BP, answers_B = self._candidates(rng, 16 + missing * 8 // len(checksums))
            valid_B = self._without_tie(digits_BP, answers_B) & np.isin(_checksum(digits_BP), checksums)
            kept.append((digits_BP[valid_B], answers_B[valid_B]))
            missing -= int(valid_B.sum())
        if missing > 0:
            raise ValueError(
                f"MostFrequentDigit(prompt_length={self.prompt_length}, majority_share={self.majority_share}): hardly "
                "any prompt has a single most frequent digit; raise majority_share or prompt_length."
            )
        if not kept:
            return np.empty((0, self.prompt_length), np.int64), np.empty(0, np.int64)
        digits, answers = zip(*kept, strict=True)
        return np.concatenate(digits)[:count], np.concatenate(answers)[:count]

    def _candidates(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        answers_B = rng.integers(0, 10, count)
        others = (count, self.prompt_length - self._majority_count)
        digits_BP = np.empty((count, self.prompt_length), np.int64)
        digits_BP[:, : self._majority_count] = answers_B[:, None]
        digits_BP[:, self._majority_count :] = (answers_B[:, None] + rng.integers(1, 10, others)) % 10
        return rng.permuted(digits_BP, axis=1), answers_B

    def _without_tie(self, digits_BP: np.ndarray, answers_B: np.ndarray) -> np.ndarray:
        counts_BD = np.stack([(digits_BP == digit).sum(axis=1) for digit in range(10)], axis=1)
        counts_BD[np.arange(len(answers_B)), answers_B] = 0
        return counts_BD.max(axis=1) < self._majority_count


def _checksum(digits_BP: np.ndarray) -> np.ndarray:
    """Return a number from 0 to 7 per prompt that depends on all its digits."""
    return (digits_BP @ np.arange(1, 2 * digits_BP.shape[1], 2)) % 8
