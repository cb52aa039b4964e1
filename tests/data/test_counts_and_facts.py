"""What is said of the data: how much of it is used, and what a resumed run must agree in."""

import datetime
import logging
import re
import subprocess
import sys
import time
from enum import Enum

import numpy as np
import pytest
import torch
from helpers.scripts import run_script
from PIL import Image

from pl_grouprl.data import PromptDataModule
from pl_grouprl.data.encoding import LengthPolicy
from pl_grouprl.data.rows import SourceRow, digest_rows
from pl_grouprl.demo.tasks import digit_tokenizer

ROWS = [{"prompt": "1" * (1 + number % 10), "answer": str(number)} for number in range(100)]


def loaded(rows=ROWS, **options):
    data = PromptDataModule(rows, **{"batch_size": 8, "tokenizer": digit_tokenizer(), **options})
    data.setup("fit")
    return data


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"max_prompt_length": 4}, "40 kept, 60 dropped (longer than max_prompt_length=4), 0 truncated"),
        ({"max_prompt_length": 4, "overlong_prompts": "truncate"}, "100 kept, 0 dropped, 60 truncated "
            "(to max_prompt_length=4); each epoch omits 4 that do not fill a batch (drop_last)"),
        ({"drop_last": False}, "100 kept, 0 dropped, 0 truncated"),
    ],
)  # fmt: skip
def test_one_line_says_what_became_of_the_rows(options, line, caplog):
    with caplog.at_level(logging.INFO):
        data = loaded(val=[{"prompt": "1"}], **options)
    told = [record.getMessage() for record in caplog.records]
    assert told == [f"train: 100 rows, {line}", "val: 1 rows, 1 kept, 0 dropped, 0 truncated"]
    assert data.metrics()["data/dropped_prompts"] == float(line.split(", ")[1].split()[0])


def test_too_much_that_is_dropped_is_an_error():
    message = r"`train`\): 95 of 100 prompts .*max_prompt_length=1 \(the shortest has 1 .*max_dropped_share=0.9"
    rows = [{"prompt": "1" if number < 5 else "12"} for number in range(100)]
    with pytest.raises(ValueError, match=message):
        loaded(rows, max_prompt_length=1, batch_size=2)
    with pytest.raises(ValueError, match=r"PromptDataModule\(`val`\): 95 of 100"):
        loaded(val=rows, max_prompt_length=1)
    assert len(loaded(rows, max_prompt_length=1, batch_size=2, max_dropped_share=0.95).prompts["train"]) == 5
    assert len(loaded(rows[4:6], max_prompt_length=1, batch_size=1).prompts["train"]) == 1
    with pytest.raises(ValueError, match=r"max_dropped_share=0\.4"):
        loaded(rows[4:6], max_prompt_length=1, batch_size=1, max_dropped_share=0.4)


# Facts.


def test_a_length_limit_is_no_fact():
    assert loaded().resume_facts() == loaded(max_prompt_length=4).resume_facts()
    assert loaded().resume_facts() == loaded(max_prompt_length=4, overlong_prompts="truncate").resume_facts()
    assert loaded().resume_facts()["num_rows"] == 100


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": 4}, {"shuffle": False}, {"seed": 1}, {"drop_last": False}, {"add_special_tokens": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"rows": [*ROWS[:50], {**ROWS[50], "answer": "51"}, *ROWS[51:]]}, {"rows": [ROWS[1], ROWS[0], *ROWS[2:]]},
        {"rows": [{**ROWS[0], "more": None}, *ROWS[1:]]},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_other_rows_batches_and_encodings_are_facts(change):
    assert loaded().resume_facts() != loaded(**change).resume_facts()


def test_facts_need_the_data():
    assert PromptDataModule(ROWS).resume_facts() == {}


def test_a_chat_template_is_a_fact():
    tokenizer = digit_tokenizer()
    before = loaded(tokenizer=tokenizer).resume_facts()
    tokenizer.chat_template = "{{ messages }}"
    assert loaded(tokenizer=tokenizer).resume_facts() != before


@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_digest_is_the_same_in_every_process(fresh, tmp_path):
    """In a fresh interpreter strings have other hashes as well."""
    code = (
        "import datetime; from pl_grouprl.data.rows import SourceRow, digest_rows;"
        "row = {'b': {'y': 1.5, 'x': None}, 'a': {3: 'c', 'd': b'12'}, 's': datetime.date(2020, 1, 2), 'o': object()};"
        "print(digest_rows([SourceRow('', row)]))"
    )
    row = {"a": {"d": b"12", 3: "c"}, "o": object(), "s": datetime.date(2020, 1, 2), "b": {"x": None, "y": 1.5}}
    script = tmp_path / "script.py"
    script.write_text(code)
    if fresh:
        command, environment = [sys.executable, script], {"PYTHONHASHSEED": "7", **ENV}
        other = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    else:
        other = run_script(script)
    assert other.stdout.strip() == digest_rows([SourceRow("elsewhere", row)])


ENV = {"PYTHONPATH": ":".join(path for path in sys.path if path)}


def test_images_and_arrays_count_by_what_they_hold():
    def digest(value):
        return digest_rows([SourceRow("", {"images": [value]})])

    values = [b"1", b"2", {"bytes": b"1"}, {"path": "a"}, "a", np.arange(3), np.arange(3.0)]
    values += [np.float32(1), None, 1, "1"]
    assert len({digest(value) for value in values}) == len(values)
    assert digest(np.arange(3)) == digest(np.arange(3))


class Weekday(Enum):
    MONDAY, TUESDAY = 1, 2


HELD = {
    "tensor": lambda n: torch.tensor([n, 2.0]),
    "bfloat16": lambda n: torch.tensor([[n, 2.0]], dtype=torch.bfloat16, requires_grad=True).T,
    "sparse tensor": lambda n: torch.tensor([n, 0.0]).to_sparse(),
    "complex": lambda n: complex(n, 2.0),
    "pattern": lambda n: re.compile(f"{n}+"),
    "tensor in a list": lambda n: [{"ids": torch.tensor(n)}],
    "array of objects": lambda n: np.array([f"text {n}", {"a": n}], dtype=object),
    "set": lambda n: {n, 8 * n},
    "image": lambda n: Image.new("L", (2, 2), n),
    "dataclass": lambda n: LengthPolicy(n),
    "enum": lambda n: Weekday(n),
}


@pytest.mark.parametrize("kind", HELD)
def test_values_count_by_what_they_hold_not_by_their_addresses(kind):
    values = [HELD[kind](number) for number in (1, 1, 2)]
    one, same, other = [digest_rows([SourceRow("", {"column": value})]) for value in values]
    assert one == same != other


def test_the_order_in_which_a_set_was_filled_does_not_count():
    one, other = ({0, 8}, {8, 0})
    assert repr(one) != repr(other)
    assert digest_rows([SourceRow("", {"a": one})]) == digest_rows([SourceRow("", {"a": other})])


def test_the_digest_is_cheap(record_property):
    rows = [
        SourceRow("", {"prompt": "what is it? " * 30, "answer": str(n), "extra_info": {"index": n}})
        for n in range(10000)
    ]
    start = time.process_time()
    assert len(digest_rows(rows)) == 64
    seconds = 10 * (time.process_time() - start)
    record_property("figure", f"digest of 100,000 rows of 360 characters: {seconds:.2f} s (from 10,000, one core)")


def test_a_row_that_holds_itself_is_named():
    row = {"prompt": "1"}
    row["extra_info"] = [row]
    with pytest.raises(ValueError, match="train, row 0: nested too deeply, or within itself"):
        loaded([row], batch_size=1)


def test_ranks_that_read_other_rows_are_refused(monkeypatch):
    def other_rank(facts, device):
        return [facts] if isinstance(facts, str) else [facts, facts | {"train": "another digest"}]

    monkeypatch.setattr("pl_grouprl.data.prompt_data_module.gather_plain", other_rank)
    with pytest.raises(ValueError, match=r"train is '\w+' here and 'another digest' on rank 1"):
        loaded()
