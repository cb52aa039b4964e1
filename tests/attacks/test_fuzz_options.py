"""A few cases of the option fuzzer; `python -m tests.attacks.fuzz_options` runs any number."""

import importlib.util
import logging
import os
import random
import sys
from pathlib import Path

import pytest

spec = importlib.util.spec_from_file_location("fuzz_options", Path(__file__).with_name("fuzz_options.py"))
assert spec is not None
assert spec.loader is not None
fuzz_options = importlib.util.module_from_spec(spec)


def load():
    sys.modules[spec.name] = fuzz_options  # its dataclass looks itself up
    spec.loader.exec_module(fuzz_options)
    return fuzz_options


@pytest.mark.parametrize(("count", "seed"), [(15, 6), pytest.param(1000, 0, marks=pytest.mark.slow)])
def test_option_sets_run_or_are_refused_by_name(count, seed, record_property):
    own = load()
    before = [logging.getLogger(name).level for name in ("lightning.pytorch", "pl_grouprl")], dict(os.environ)
    counts, findings = own.fuzz(count, seed)
    assert before == ([logging.getLogger(name).level for name in ("lightning.pytorch", "pl_grouprl")], dict(os.environ))
    record_property("figure", f"{count} option sets: {counts['run']} ran, {counts['refused']} refused by name")
    assert findings == []
    assert counts["run"] >= 3
    assert counts["refused"] >= 3


def test_an_error_without_the_name_is_a_finding():
    own = load()
    case = own.Case("python", own.GRPO, model={"seed": 1}, drawn=["seed"])
    own.run_python = lambda case, folder: (_ for _ in ()).throw(ZeroDivisionError("integer modulo by zero"))
    assert own.outcome(case)[0] == "finding"
    own.run_python = lambda case, folder: (_ for _ in ()).throw(ValueError("seed is 1; it must be odd"))
    assert own.outcome(case)[0] == "refused"


def test_cases_depend_on_the_seed_alone():
    own = load()
    assert own.draw(random.Random("0/3")) == own.draw(random.Random("0/3"))
