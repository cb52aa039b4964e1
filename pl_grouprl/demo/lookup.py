"""Built-in task with a tool: find a telephone number in a long directory that only the tool can read.

The directory gives each person's room, and the telephone of each room, so the second call depends on the first result:

    <user>telephone of bak<end>
    <assistant><call>look_up bak<end>       <result>room 985<end>
    <assistant><call>look_up 985<end>       <result>telephone 8103<end>
    <assistant>8103<end>
"""

from __future__ import annotations

import functools
import itertools
import re
import string
from typing import Any

import numpy as np

from pl_grouprl.chat.template_files import read_template
from pl_grouprl.types import Messages
from pl_grouprl.utilities.arguments import checked_arguments

PAD_TOKEN, END_TOKEN, ASSISTANT_TOKEN = "<pad>", "<end>", "<assistant>"
_SPECIAL_TOKENS = (PAD_TOKEN, END_TOKEN, "<user>", ASSISTANT_TOKEN, "<call>", "<result>")

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


@checked_arguments
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
        if not 0 <= mistake_share <= 1:
            raise ValueError(f"TwoStepLookup.mistake_share is {mistake_share}; it must be in [0, 1].")
        self.sizes = {"train": train_size, "val": val_size, "test": test_size}
        self.mistake_share = mistake_share
        self.seed = seed
        self._shared_directory = shared_directory  # private: demonstrations, and policies made from them, do not change

    def rows(self, split: str) -> list[dict[str, Any]]:
        """Return the rows of a split, with the columns `prompt`, `answer`, `directory` and `data_source`.

        Args:
            split: `train`, `val` or `test`.
        """
        if split not in self.sizes:
            raise ValueError(f"TwoStepLookup has no split {split!r}; it has {sorted(self.sizes)}.")
        rng = np.random.default_rng((self.seed, _SPLITS.index(split)))
        make = self._shared_row if self._shared_directory else self._row
        return [make(rng, split) for _ in range(self.sizes[split])]

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
        texts = [
            tokenizer.apply_chat_template(row["prompt"] + self._episode(row, rng), tokenize=False)
            for row in (self._row(rng, "demonstrations") for _ in range(count))
        ]
        return [_demonstration(ids, tokenizer) for ids in tokenizer(texts)["input_ids"]] if texts else []

    def tokenizer(self) -> Any:
        """Return the tokenizer of the task."""
        return lookup_tokenizer()

    def _row(self, rng: np.random.Generator, split: str) -> dict[str, Any]:
        number = int(rng.integers(2**40)) * len(_SPLITS) + _SPLITS.index(split)
        return self._question(number, str(rng.choice(_people(number))))

    def _shared_row(self, rng: np.random.Generator, split: str) -> dict[str, Any]:
        people = _people(SHARED_DIRECTORY)[_SPLITS.index(split) :: len(_SPLITS)]
        return self._question(SHARED_DIRECTORY, str(rng.choice(people)))

    def _question(self, number: int, name: str) -> dict[str, Any]:
        directory = entries(number)
        return {
            "prompt": [{"role": "user", "content": _USER + name}],
            "answer": directory[directory[name].removeprefix(_ROOM)].removeprefix(_TELEPHONE),
            "directory": number,
            "data_source": "two_step_lookup",
        }

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
        calls = [message for key in keys for message in _call(key, directory.get(key, _NO_ENTRY))]
        return [*calls, {"role": "assistant", "content": answer}]


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


def lookup_tokenizer() -> Any:
    """Build the tokenizer of the task, with the chat template `plain`.

    The words of its sentences, with a following space, are tokens; anything else is spelled in ASCII characters.

    Returns:
        A `PreTrainedTokenizerFast`; `AutoTokenizer` loads what its `save_pretrained` writes.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    sentences = (_USER, _ROOM, _TELEPHONE, _NO_ENTRY, _UNKNOWN, "look_up ")
    words = sorted({word for text in sentences for word in re.findall(r"\w{2,} ?", text)}, key=lambda w: (-len(w), w))
    characters = [character for character in string.printable if character.isprintable()]
    vocabulary = {token: index for index, token in enumerate((*_SPECIAL_TOKENS, *words, *characters))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD_TOKEN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("|".join((*words, "."))), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        additional_special_tokens=[token for token in _SPECIAL_TOKENS if token not in (PAD_TOKEN, END_TOKEN)],
        clean_up_tokenization_spaces=False,
        chat_template=read_template("plain"),
    )


@functools.lru_cache(maxsize=1)
def _cached_tokenizer() -> Any:
    return lookup_tokenizer()


def _call(key: str, entry: str) -> Messages:
    function = {"name": Directory.look_up.__name__, "arguments": {"key": key}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "name": function["name"], "content": entry},
    ]


def _demonstration(token_ids: list[int], tokenizer: Any) -> tuple[list[int], list[int], list[int]]:
    """Split an episode at the policy's first token; the policy writes from assistant tokens to end tokens."""
    assistant, end = tokenizer.convert_tokens_to_ids([ASSISTANT_TOKEN, END_TOKEN])
    start = token_ids.index(assistant) + 1
    writes, loss_mask = True, []
    for token in token_ids[start:]:
        loss_mask.append(int(writes))
        writes = token != end and (writes or token == assistant)
    return token_ids[:start], token_ids[start:], loss_mask
