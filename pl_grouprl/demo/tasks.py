"""Synthetic tasks of the default runs, with and without tools."""

from __future__ import annotations

import functools
import itertools
import re
import string
from fractions import Fraction
from typing import Any

import numpy as np

from pl_grouprl.chat.format import read_template
from pl_grouprl.types import Messages
from pl_grouprl.utilities.options import check_options

PAD_TOKEN, END_TOKEN, ASSISTANT_TOKEN = "<pad>", "<end>", "<assistant>"

# A tool for word problems: arithmetic with exact fractions, limited to numbers, + - * / and parentheses.

_MAX_CHARACTERS = 200
_TOKEN = re.compile(r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+|\S")


def calculate(expression: str) -> str:
    """Calculate the value of an arithmetic expression.

    Args:
        expression: Numbers, + - * / and parentheses, such as (12 + 3.5) * 4.

    Returns:
        The value, rounded to ten significant digits if it is not whole.

    Raises:
        ValueError: If it is not such an expression, or longer than 200 characters.
        ZeroDivisionError: If it divides by zero.
    """
    if len(expression) > _MAX_CHARACTERS:
        raise ValueError(f"the expression has {len(expression)} characters; at most {_MAX_CHARACTERS} are allowed")
    parser = _Expression(expression)
    value = parser.sum()
    if rest := parser.take():
        raise ValueError(f"unexpected {rest!r} in the expression")
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


class _Expression:
    """Parses an expression by recursive descent; ignores thousands separators."""

    def __init__(self, text: str) -> None:
        self._tokens = _TOKEN.findall(text.replace(",", ""))[::-1]  # the next one last

    def take(self, wanted: str = "") -> str:
        """Consume and return the next token if it is wanted (any, by default); otherwise return an empty string."""
        is_wanted = self._tokens and (not wanted or self._tokens[-1] in wanted)
        return self._tokens.pop() if is_wanted else ""

    def sum(self) -> Fraction:
        """The value of an expression, up to the first token that does not continue it."""
        value = self._product()
        while sign := self.take("+-"):
            value = value + self._product() if sign == "+" else value - self._product()
        return value

    def _product(self) -> Fraction:
        value = self._factor()
        while sign := self.take("*/"):
            value = value * self._factor() if sign == "*" else value / self._factor()
        return value

    def _factor(self) -> Fraction:
        if sign := self.take("+-"):
            return self._factor() if sign == "+" else -self._factor()
        if self.take("("):
            value = self.sum()
            if not self.take(")"):
                raise ValueError("a parenthesis is not closed in the expression")
            return value
        found = self.take()
        if found[:1] not in set(".0123456789") or found == ".":
            raise ValueError(f"expected a number in the expression, found {found!r}")
        return Fraction(found)


# Built-in task: find the most frequent digit in a long prompt. Generated with NumPy, without a download.

DIGIT_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

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
    return _tokenizer(_IDS, ".")


def _tokenizer(vocabulary: dict[str, int], pattern: str, **options: Any) -> Any:
    """A tokenizer whose tokens are the matches of a pattern."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD_TOKEN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    backend.decoder = decoders.Fuse()
    special = {"eos_token": END_TOKEN, "pad_token": PAD_TOKEN}
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special, **options)


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
        check_options(
            {
                "MostFrequentDigit.prompt_length": (prompt_length, prompt_length >= 1, "at least 1"),
                "MostFrequentDigit.majority_share": (majority_share, 0 <= majority_share <= 1, "in [0, 1]"),
                "MostFrequentDigit.label_noise": (label_noise, 0 <= label_noise <= 1, "in [0, 1]"),
            }
        )
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

    def demonstrations(self, count: int, seed: int = 0) -> list[tuple[list[int], list[int]]]:
        """Return prompts with completions to imitate, some of which are wrong.

        Args:
            count: Number of demonstrations.
            seed: Determines them, together with the task's seed.

        Returns:
            Pairs (prompt ids, completion ids); completions include the end token.
        """
        rng = np.random.default_rng((self.seed, _STREAMS["demonstrations"], seed))
        digits_BP, answers_B = self._draw(rng, count, _CHECKSUMS["train"])
        wrong_B = rng.random(count) < self.label_noise
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
        kept_digits, kept_answers = [np.empty((0, self.prompt_length), np.int64)], [np.empty(0, np.int64)]
        missing, majority = count, self._majority_count
        for _ in range(_MAX_ROUNDS):
            if missing <= 0:
                break
            size = 16 + missing * 8 // len(checksums)
            answers_B = rng.integers(0, 10, size)
            digits_BP = np.empty((size, self.prompt_length), np.int64)
            digits_BP[:, :majority] = answers_B[:, None]
            others = rng.integers(1, 10, (size, self.prompt_length - majority))
            digits_BP[:, majority:] = (answers_B[:, None] + others) % 10
            digits_BP = rng.permuted(digits_BP, axis=1)
            counts_BD = np.stack([(digits_BP == digit).sum(axis=1) for digit in range(10)], axis=1)
            counts_BD[np.arange(size), answers_B] = 0
            checksums_B = (digits_BP @ np.arange(1, 2 * self.prompt_length, 2)) % 8  # depends on all digits
            valid_B = (counts_BD.max(axis=1) < majority) & np.isin(checksums_B, checksums)
            kept_digits.append(digits_BP[valid_B])
            kept_answers.append(answers_B[valid_B])
            missing -= int(valid_B.sum())
        if missing > 0:
            raise ValueError(
                f"MostFrequentDigit(prompt_length={self.prompt_length}, majority_share={self.majority_share}): hardly "
                "any prompt has a single most frequent digit; raise majority_share or prompt_length."
            )
        return np.concatenate(kept_digits)[:count], np.concatenate(kept_answers)[:count]


# Built-in task with a tool: find a telephone number in a long directory that only the tool can read.
#
# The directory gives each person's room, and the telephone of each room, so the second call depends on the first
# result:
#
#     <user>telephone of bak<end>
#     <assistant><call>look_up bak<end>       <result>room 985<end>
#     <assistant><call>look_up 985<end>       <result>telephone 8103<end>
#     <assistant>8103<end>

_SPECIAL_TOKENS = ("<user>", ASSISTANT_TOKEN, "<call>", "<result>")

_USER, _ROOM, _TELEPHONE, _NO_ENTRY, _UNKNOWN = "telephone of ", "room ", "telephone ", "no entry", "unknown"

PEOPLE = 300
"""People in a directory, which has twice as many entries."""

SHARED_DIRECTORY = 0
"""The directory that `look_up` reads."""

_NAMES = ["".join(letters) for letters in itertools.product("bdfgklmnprstvz", "aeiou", "bdfgklmnprstvz")]
_ROOMS = ["".join(digits) for digits in itertools.permutations(string.digits, 3)]
_SPLITS = ("train", "val", "test", "demonstrations")
MISTAKES = ("stops early", "repeats the name", "cuts the room", "gives up")
"""Mistakes in demonstrations, in order: answers with the room; looks the name up twice and answers with the room; looks
up only the first digits of the room, which finds nothing; calls no tool."""


def look_up(key: str) -> str:
    """Look up an entry of the directory.

    Args:
        key: A person's name, or the number of a room.

    Returns:
        The person's room, or the room's telephone.
    """
    return entries(SHARED_DIRECTORY).get(key, _NO_ENTRY)


class Directory:
    """The environment of `TwoStepLookup`: one directory, and the tool that reads it."""

    def __init__(self) -> None:
        self._entries: dict[str, str] = {}

    def reset(self, directory: int, **columns: Any) -> None:
        """Open the directory of a row."""
        self._entries = entries(directory)

    def look_up(self, key: str) -> str:
        """Look up an entry of the directory.

        Args:
            key: A person's name, or the number of a room.

        Returns:
            The person's room, or the room's telephone.
        """
        return self._entries.get(key, _NO_ENTRY)


class TwoStepLookup:
    """Questions about telephone numbers. Each takes two tool calls: the person's room, then the room's telephone.

    Each row has its own directory, a number in the column `directory`, which the environment `Directory` opens. The
    same arguments give the same data. No directory occurs in two splits, or in a split and the demonstrations.

    With `shared_directory`, all rows ask about one directory instead, which the function `look_up` reads without an
    environment, so that episodes can branch. No person occurs in two splits then.

    Args:
        train_size: Rows of split `train`.
        val_size: Rows of split `val`.
        test_size: Rows of split `test`.
        mistake_share: Average fraction of demonstrations with one of `MISTAKES`, each equally often.
        seed: Determines all data.
        shared_directory: Whether all rows ask about the directory of `look_up`. Demonstrations are the same either way.
    """

    def __init__(
        self,
        train_size: int = 4096,
        val_size: int = 64,
        test_size: int = 256,
        mistake_share: float = 0.7,
        seed: int = 0,
        shared_directory: bool = False,
    ) -> None:
        check_options({"TwoStepLookup.mistake_share": (mistake_share, 0 <= mistake_share <= 1, "in [0, 1]")})
        self.sizes = {"train": train_size, "val": val_size, "test": test_size}
        self.mistake_share = mistake_share
        self.seed = seed
        self._shared_directory = shared_directory  # private: demonstrations, and policies made from them, do not change

    def rows(self, split: str) -> list[dict[str, Any]]:
        """Return the rows of a split, with the columns `prompt`, `answer`, `directory` and `data_source`.

        Args:
            split: `train`, `val` or `test`.
        """
        rng = np.random.default_rng((self.seed, _SPLITS.index(split)))
        people = _people(SHARED_DIRECTORY)[_SPLITS.index(split) :: len(_SPLITS)]
        if self._shared_directory:
            return [_question(SHARED_DIRECTORY, str(rng.choice(people))) for _ in range(self.sizes[split])]
        return [self._row(rng, split) for _ in range(self.sizes[split])]

    def demonstrations(self, count: int, seed: int = 0) -> list[tuple[list[int], list[int], list[int]]]:
        """Return episodes to imitate, some of them with a mistake.

        Args:
            count: Number of demonstrations.
            seed: Determines them, together with the task's seed.

        Returns:
            Prompt ids, completion ids including tool results and end tokens, and the completion's loss mask, which is 0
            for tokens of results.
        """
        rng = np.random.default_rng((self.seed, _SPLITS.index("demonstrations"), seed))
        tokenizer = _cached_tokenizer()
        assistant, end = tokenizer.convert_tokens_to_ids([ASSISTANT_TOKEN, END_TOKEN])
        found = []
        for _ in range(count):
            row = self._row(rng, "demonstrations")
            text = tokenizer.apply_chat_template(row["prompt"] + self._episode(row, rng), tokenize=False)
            token_ids = tokenizer(text)["input_ids"]
            start = token_ids.index(assistant) + 1
            writes, loss_mask = True, []  # the policy writes from assistant tokens to end tokens
            for token in token_ids[start:]:
                loss_mask.append(int(writes))
                writes = token != end and (writes or token == assistant)
            found.append((token_ids[:start], token_ids[start:], loss_mask))
        return found

    def tokenizer(self) -> Any:
        """Return the tokenizer of the task."""
        return lookup_tokenizer()

    def _row(self, rng: np.random.Generator, split: str) -> dict[str, Any]:
        number = int(rng.integers(2**40)) * len(_SPLITS) + _SPLITS.index(split)
        return _question(number, str(rng.choice(_people(number))))

    def _episode(self, row: dict[str, Any], rng: np.random.Generator) -> Messages:
        """The completion of a demonstration as messages, possibly with a mistake."""
        directory = entries(row["directory"])
        name = row["prompt"][-1]["content"].removeprefix(_USER)
        room = directory[name].removeprefix(_ROOM)
        mistake = MISTAKES[rng.integers(len(MISTAKES))] if rng.random() < self.mistake_share else None
        keys, answer = {
            None: ([name, room], row["answer"]),
            "stops early": ([name], room),
            "repeats the name": ([name, name], room),
            "cuts the room": ([name, room[:-1]], _UNKNOWN),
            "gives up": ([], _UNKNOWN),
        }[mistake]
        messages: Messages = []
        for key in keys:
            call = {"type": "function", "function": {"name": "look_up", "arguments": {"key": key}}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "name": "look_up", "content": directory.get(key, _NO_ENTRY)})
        return [*messages, {"role": "assistant", "content": answer}]


@functools.lru_cache(maxsize=64)
def entries(number: int) -> dict[str, str]:
    """The directory with this number: rooms by name, and telephones by room."""
    rng = np.random.default_rng(number)
    names = [_NAMES[index] for index in rng.permutation(len(_NAMES))[:PEOPLE]]
    rooms = [_ROOMS[index] for index in rng.permutation(len(_ROOMS))[:PEOPLE]]
    telephones = rng.integers(10_000, size=PEOPLE).tolist()
    return {name: _ROOM + room for name, room in zip(names, rooms, strict=True)} | {
        room: f"{_TELEPHONE}{telephone:04d}" for room, telephone in zip(rooms, telephones, strict=True)
    }


def _people(number: int) -> list[str]:
    return [key for key in entries(number) if key.isalpha()]


def _question(number: int, name: str) -> dict[str, Any]:
    directory = entries(number)
    return {
        "prompt": [{"role": "user", "content": _USER + name}],
        "answer": directory[directory[name].removeprefix(_ROOM)].removeprefix(_TELEPHONE),
        "directory": number,
        "data_source": "two_step_lookup",
    }


def lookup_tokenizer() -> Any:
    """Build the tokenizer of the task, with the chat template `plain`.

    The words of its sentences, with a following space, are tokens; anything else is spelled in ASCII characters.

    Returns:
        A `PreTrainedTokenizerFast`; `AutoTokenizer` loads what its `save_pretrained` writes.
    """
    sentences = (_USER, _ROOM, _TELEPHONE, _NO_ENTRY, _UNKNOWN, "look_up ")
    words = sorted({word for text in sentences for word in re.findall(r"\w{2,} ?", text)}, key=lambda w: (-len(w), w))
    characters = [character for character in string.printable if character.isprintable()]
    tokens = (PAD_TOKEN, END_TOKEN, *_SPECIAL_TOKENS, *words, *characters)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    options = {"additional_special_tokens": list(_SPECIAL_TOKENS), "chat_template": read_template("plain")}
    return _tokenizer(vocabulary, "|".join((*words, ".")), **options)


_cached_tokenizer = functools.cache(lookup_tokenizer)
