"""A few cases of the option fuzzer; `python -m tests.attacks.fuzz_options` runs any number."""

import importlib.util
import random
from pathlib import Path

spec = importlib.util.spec_from_file_location("fuzz_options", Path(__file__).with_name("fuzz_options.py"))
assert spec is not None
assert spec.loader is not None
fuzz_options = importlib.util.module_from_spec(spec)


def load():
    import sys

    sys.modules[spec.name] = fuzz_options  # its dataclass looks itself up
    spec.loader.exec_module(fuzz_options)
    return fuzz_options


def test_option_sets_run_or_are_refused_by_name(record_property):
    own = load()
    counts, findings = own.fuzz(40, seed=1)
    record_property("figure", f"40 option sets: {counts['run']} ran, {counts['refused']} refused by name")
    assert findings == []
    assert counts["run"] >= 5
    assert counts["refused"] >= 5


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
