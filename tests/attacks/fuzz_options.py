"""Random sets of options, valid or not: each must run for a few steps, or fail with an error that names an option.

    python -m tests.attacks.fuzz_options --count 1000 --seed 0

Draws options of GRPO, PPO, GroupPPO, Distillation, PromptDataModule, their configs, callbacks and Trainer, as Python
keywords, nested mappings, or YAML for the command line's parser; values of the right type, at its limits, and of other
types; misspelt, foreign and unknown names. Any other outcome is a finding.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import logging
import os
import random
import re
import signal
import sys
import tempfile
import time
import traceback
import typing
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

if __name__ == "__main__":  # as a command; under pytest, conftest.py has done so
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from pl_grouprl.algorithms import GRPO, PPO, Distillation, GroupPPO
from pl_grouprl.callbacks import CompletionsTable, ExportPolicy, RunSummary, SafeCheckpoint, ValidateAtStart
from pl_grouprl.data import PromptDataModule
from pl_grouprl.demo import MostFrequentDigit
from pl_grouprl.demo.tasks import digit_tokenizer

SECONDS_PER_CASE = 60
ALGORITHMS = (GRPO, PPO, GroupPPO, Distillation)
CALLBACKS = (CompletionsTable, ExportPolicy, RunSummary, SafeCheckpoint, ValidateAtStart)
TRAINER: dict[str, Any] = {
    "max_steps": int,
    "max_epochs": int,
    "accumulate_grad_batches": int,
    "gradient_clip_val": float | None,
    "val_check_interval": int | float | None,
    "check_val_every_n_epoch": int | None,
    "limit_train_batches": int | float,
    "limit_val_batches": int | float,
    "num_sanity_val_steps": int,
    "log_every_n_steps": int,
    "overfit_batches": int | float,
    "reload_dataloaders_every_n_epochs": int,
    "deterministic": bool,
    "precision": Literal["32-true", "bf16-mixed", "bf16-true"],
}
LARGEST = {"num_generations": 8, "max_staleness": 3, "steps": 4, "train_size": 64}
FIXED = {
    *(
        "workers",
        "memory_limit_mb",
        "policy",
        "rewards",
        "train",
        "val",
        "test",
        "tokenizer",
        "processor",
    ),
    *("engine", "critic", "teacher", "tools", "environment_factory", "harness", "chat_template", "rewritten_history"),
    *("dirpath", "path", "processor"),
}
FOREIGN = ("per_device_train_batch_size", "max_completion_length", "lr", "kl_coef", "num_train_epochs", "clip_ratio")
GIVEN = re.compile(r"^ *Given value: .*$", re.MULTILINE)


class TinyPolicy:
    """A random Qwen3 of one layer, the same each time."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def load(self) -> Any:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "max_position_embeddings": 64}
        heads = {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "eos_token_id": 1,
            "pad_token_id": 0,
        }
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            return Qwen3ForCausalLM(Qwen3Config(vocab_size=len(digit_tokenizer()), **sizes, **heads))

    def load_tokenizer(self) -> Any:
        return digit_tokenizer()


def share_of_letters(completions: list[str], **columns: Any) -> list[float]:
    """Reward: how much of a completion is letters."""
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]


@dataclasses.dataclass
class Case:
    """Options by group, and the names that were drawn, one of which an error must contain."""

    form: str
    algorithm: type
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    data: dict[str, Any] = dataclasses.field(default_factory=dict)
    trainer: dict[str, Any] = dataclasses.field(default_factory=dict)
    callbacks: list[tuple[type, dict[str, Any]]] = dataclasses.field(default_factory=list)
    drawn: list[str] = dataclasses.field(default_factory=list)


def misspelt(rng: random.Random, name: str) -> str:
    place = rng.randrange(len(name))
    return rng.choice((name[:place] + name[place + 1 :], name[:place] + "x" + name[place:], name + "s", name.upper()))


def valid_value(rng: random.Random, hint: Any, name: str) -> Any:
    """A value of the annotated type, in range or not."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return rng.choice(args)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return config(rng, hint)
    if origin in (tuple, list):
        items = [arg for arg in args if arg is not Ellipsis]
        count = len(items) if origin is tuple and Ellipsis not in args else rng.randrange(3)
        return [valid_value(rng, items[i % len(items)], name) for i in range(count)]
    if args and origin is not dict:  # a union
        return valid_value(rng, rng.choice(args), name)
    simple = {
        bool: lambda: rng.random() < 0.5,
        int: lambda: rng.randint(1, LARGEST.get(name, 6)) if rng.random() < 0.9 else rng.choice((0, -1, 7)),
        float: lambda: rng.choice((0.0, 1e-3, 0.1, 0.5, 0.9, 1.0, 2.0, 10.0, -0.5)),
        str: lambda: rng.choice(("auto", "none", "ppo", "k1", "token-mean", "prompt", "x")),
        dict: dict,
    }
    return simple.get(origin or hint, lambda: None)()


def config(rng: random.Random, cls: type) -> dict[str, Any]:
    """A mapping for a config class, occasionally with an unknown name."""
    fields = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls) if field.name not in FIXED]
    chosen = rng.sample(names, rng.randrange(min(3, len(names)) + 1))
    found = {name: valid_value(rng, fields[name], name) for name in chosen}
    if rng.random() < 0.1:
        found[misspelt(rng, rng.choice(names))] = 1
    return found


def options(rng: random.Random, known: dict[str, Any], most: int, *, typed: bool = False) -> dict[str, Any]:
    """Some options by name, a few of them unknown unless `typed`, as for what Lightning reads."""
    names = [name for name in known if name not in FIXED]
    chosen = rng.sample(names, min(rng.randrange(most + 1), len(names)))
    found = {name: valid_value(rng, known[name], name) for name in chosen}
    if names and not typed and rng.random() < 0.08:
        found[rng.choice((misspelt(rng, rng.choice(names)), rng.choice(FOREIGN), "zzz"))] = rng.choice((1, "a", {}))
    return found


def known_options(cls: type) -> dict[str, Any]:
    """Annotations of all parameters that the constructors of a class take."""
    constructors = [vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base)]
    hints = [typing.get_type_hints(constructor) for constructor in reversed(constructors)]
    known = {name: hint for own in hints for name, hint in own.items()}
    return {name: hint for name, hint in known.items() if name not in ("return", "kwargs", "args")}


def draw(rng: random.Random) -> Case:
    """One case; most have few options, so that many of them run."""
    case = Case(rng.choice(("python", "python", "yaml")), rng.choice(ALGORITHMS))
    case.model = options(rng, known_options(case.algorithm), 4)
    if rng.random() < 0.4:
        case.data = options(rng, known_options(PromptDataModule), 2)
    if rng.random() < 0.4:
        case.trainer = options(rng, TRAINER, 2, typed=case.form == "python")
    if rng.random() < 0.3:
        cls = rng.choice(CALLBACKS)
        typed = case.form == "python" and issubclass(cls, ModelCheckpoint)
        case.callbacks = [(cls, options(rng, known_options(cls), 2, typed=typed))]
    groups = (case.model, case.data, case.trainer, *(own for _, own in case.callbacks))
    case.drawn = [name for group in groups for name in names_of(group)]
    return case


def names_of(group: dict[str, Any]) -> Iterator[str]:
    """Names of options, including nested ones."""
    for name, own in group.items():
        yield name
        if isinstance(own, dict):
            yield from names_of({str(key): item for key, item in own.items()})


def run_python(case: Case, folder: Path) -> None:
    """Construct everything and train."""
    model = {"num_generations": 2, "sampling": {}, "sharing": {}} | case.model
    for name, default in {"sampling": {"max_new_tokens": 3}, "sharing": {"verify": False}}.items():
        if isinstance(model[name], dict):
            model[name] = default | model[name]
    if case.algorithm is Distillation:
        model["teacher"] = TinyPolicy(seed=1)
    module = case.algorithm(TinyPolicy(), share_of_letters, **model)
    task = MostFrequentDigit(prompt_length=8, majority_share=0.4, train_size=8, val_size=2)
    data = PromptDataModule(task, task, **({"batch_size": 2} | case.data))
    callbacks = [cls(**own) for cls, own in case.callbacks]
    limits = {"max_steps": 2, "limit_val_batches": 1, "num_sanity_val_steps": 0} | case.trainer
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    trainer = Trainer(
        **limits, **quiet, devices=1, callbacks=callbacks, default_root_dir=folder, enable_checkpointing=bool(callbacks)
    )
    trainer.fit(module, datamodule=data)
    if trainer.global_step == 0:
        raise RuntimeError("the run ended without a step")
    if not all(parameter.isfinite().all() for parameter in module.policy.parameters()):
        raise RuntimeError("the run ended with weights that are not finite")


def run_yaml(case: Case, folder: Path) -> None:
    """Parse the same options as a configuration file; run them like the Python form if they parse."""
    import yaml

    from pl_grouprl import cli

    def plain(options: dict[str, Any]) -> dict[str, Any]:
        """The options without classes, which YAML does not have."""
        values = {name: plain(own) if isinstance(own, dict) else own for name, own in options.items()}
        return {name: None if own is object else own for name, own in values.items()}

    def entry(path: str, own: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"class_path": f"pl_grouprl.{path}", "init_args": more | own}

    case = dataclasses.replace(
        case,
        model=plain(case.model),
        data=plain(case.data),
        trainer=plain(case.trainer),
        callbacks=[(cls, plain(own)) for cls, own in case.callbacks],
    )
    reward = {"class_path": "pl_grouprl.rewards.ExactMatch"}
    teacher = {"teacher": "gpt2-large"} if case.algorithm is Distillation else {}
    callbacks = [entry(f"callbacks.{cls.__name__}", own) for cls, own in case.callbacks]
    text = yaml.safe_dump(
        {
            "model": entry(case.algorithm.__name__, case.model, policy="gpt2", rewards=reward, **teacher),
            "data": entry("PromptDataModule", case.data),
            "trainer": case.trainer | {"callbacks": callbacks},
        }
    )
    path = folder / "config.yaml"
    path.write_text(text)
    parsed: list[Any] = []

    class OnlyParse(cli.RLCLI):
        def instantiate_classes(self) -> None:
            parsed.append(self.config)
            raise Parsed

    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            OnlyParse(["fit", "--config", str(path)])
    except Parsed:
        run_python(case, folder)
    except SystemExit as error:
        raise ValueError(errors.getvalue()) from error


class Parsed(Exception):
    """Ends the parser once it has accepted the configuration."""


class TooLong(BaseException):
    """A case did not end in time."""


def _alarm(*_: Any) -> None:
    raise TooLong


def outcome(case: Case) -> tuple[str, str]:
    """How a case ended (`run`, `refused` or `finding`), and the message."""
    signal.signal(signal.SIGALRM, _alarm)
    signal.alarm(SECONDS_PER_CASE)
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            (run_yaml if case.form == "yaml" else run_python)(case, Path(folder))
        return "run", ""
    except TooLong:
        return "finding", f"no end after {SECONDS_PER_CASE} s"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        text = GIVEN.sub("", str(error))  # jsonargparse repeats its whole input
        if any(re.search(rf"\b{re.escape(name)}\b", text) for name in case.drawn):
            return "refused", said
        frames = traceback.extract_tb(error.__traceback__)
        return "finding", f"{said} [{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}]"
    finally:
        signal.alarm(0)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence Lightning's output; afterwards the process is as it was."""
    loggers = [logging.getLogger(name) for name in ("lightning", "lightning.pytorch", "lightning.fabric", "pl_grouprl")]
    levels, environment = [logger.level for logger in loggers], dict(os.environ)
    alarm, threads = signal.getsignal(signal.SIGALRM), torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        signal.signal(signal.SIGALRM, alarm)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        os.environ.clear()
        os.environ.update(environment)


def fuzz(count: int, seed: int, first: int = 0) -> tuple[Counter[str], list[str]]:
    """Run cases; each depends on the seed and its own number alone.

    Returns:
        Counts of the outcomes, and a line for each finding.
    """
    counts: Counter[str] = Counter()
    findings = []
    for number in range(first, first + count):
        case = draw(random.Random(f"{seed}/{number}"))
        with quiet():
            kind, said = outcome(case)
        counts[kind] += 1
        counts[f"{case.form}: {kind}"] += 1
        if kind == "finding":
            shown = {"model": case.model, "data": case.data, "trainer": case.trainer, "callbacks": case.callbacks}
            where = {group: own for group, own in shown.items() if own}
            findings.append(f"{number} {case.form} {case.algorithm.__name__} {where}\n      {said[:500]}")
            print(findings[-1], flush=True)
    return counts, findings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    arguments = parser.parse_args()
    started = time.monotonic()
    counts, findings = fuzz(arguments.count, arguments.seed, arguments.first)
    seconds = time.monotonic() - started
    print(f"{arguments.count} option sets, seed {arguments.seed}, from {arguments.first}: {seconds:.0f} s")
    for form in ("python", "yaml"):
        print(f"  {form:8}", *(f"{kind} {counts[f'{form}: {kind}']:5}" for kind in ("run", "refused", "finding")))
    print(f"  {'all':8}", *(f"{kind} {counts[kind]:5}" for kind in ("run", "refused", "finding")))
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
