"""The command line: `fit`, `validate`, `test`, `parity` and `plan`, configured by YAML files that can be stacked."""

from __future__ import annotations

import difflib
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from itertools import pairwise
from pathlib import Path
from pydoc import locate
from typing import TYPE_CHECKING, Any, NoReturn, get_args, get_type_hints

import yaml
from jsonargparse import ActionConfigFile
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

from pl_grouprl.utilities.checkpoint_files import last_checkpoint, load_verified
from pl_grouprl.utilities.describe import PACKAGE
from pl_grouprl.utilities.device_defaults import default_precision
from pl_grouprl.utilities.loggers import prepare_loggers
from pl_grouprl.utilities.option_names import foreign_path, note_on_option, note_on_value
from pl_grouprl.utilities.options import config_class, field_names, suggestion

if TYPE_CHECKING:
    from pl_grouprl.checks import ParityReport
    from pl_grouprl.planning import RunPlan

# Finds what a YAML parser silently accepts in a configuration: duplicate keys, and unknown empty groups.

KeyPath = tuple[str | int, ...]

_MAY_BE_EMPTY = ("init_args", "dict_kwargs")
"""Groups that may be empty for any class."""


def refuse_duplicates(text: str, source: str) -> None:
    """Refuse text that is not a YAML mapping, and duplicate keys, of which YAML would silently use the last.

    Args:
        text: A YAML document.
        source: What to call it in the error, such as the file's path.

    Raises:
        TypeError: Names the source, the line and the key.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise TypeError(f"{source} is not YAML: {error}") from error
    if not isinstance(root, yaml.MappingNode):
        raise TypeError(f"{source} has no groups of options, such as `trainer: {{max_steps: 100}}`.")
    for path, node in _mappings(root):
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines and name != "<<":
                called = ".".join(map(str, (*path, name)))
                raise TypeError(f"{source}, line {line}: {called} is a duplicate key, first in line {lines[name]}.")
            lines[name] = line


def empty_groups(text: str) -> list[KeyPath]:
    """Find the paths of empty mappings in a YAML document."""
    return [path for path, node in _mappings(yaml.compose(text, Loader=yaml.SafeLoader)) if path and not node.value]


def refuse_unknown_groups(text: str, source: str, config: Mapping[str, Any]) -> None:
    """Refuse empty groups that are not options of the parsed configuration; the parser silently drops them.

    Raises:
        ValueError: Names the source and the group.
    """
    for path in empty_groups(text):
        parent: Any = config
        for key in path[:-1]:
            found = isinstance(parent, Mapping) and key in parent
            found = found or (isinstance(parent, list) and isinstance(key, int) and key < len(parent))
            parent = parent[key] if found else None
        if isinstance(parent, Mapping) and path[-1] not in (*parent, *_MAY_BE_EMPTY):
            raise ValueError(
                f"{source}: {'.'.join(map(str, path))} is an empty group and not an option; options there are "
                f"{', '.join(map(str, parent))}. Leave it out."
            )


def _mappings(node: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, yaml.MappingNode]]:
    """Yield all mappings of a document with their paths."""
    if isinstance(node, yaml.MappingNode):
        yield path, node
        for key, value in node.value:
            yield from _mappings(value, (*path, str(key.value)))
    elif isinstance(node, yaml.SequenceNode):
        for place, value in enumerate(node.value):
            yield from _mappings(value, (*path, place))


# Condenses the parser's report on a bad configuration, which covers every type that it tried, to one sentence.
#
# The report is an indented tree of keys and classes; the cause is at the deepest level.

AT_TOP = ("model", "data", "trainer", "ckpt_path", "seed_everything")
"""Groups and options at the top of a configuration."""

_TABLES = "docs/options.md maps the options of TRL and verl."
_SEARCHED = "; modules are searched in the working directory and in PYTHONPATH."
_SOURCES = {
    "PolicySource": "pl_grouprl.models.PretrainedPolicy",
    "CriticSource": "pl_grouprl.models.PretrainedCritic",
}
"""What takes the options of a model given by its path, by the protocol of the option."""

_UNION = "Does not validate against any of the Union subtypes"

_EXAMPLES = {
    LightningModule: "--model pl_grouprl.GRPO",
    LightningDataModule: "--data pl_grouprl.PromptDataModule",
}
"""The argument that chooses a group's class, by the group's base class."""

_KEY = re.compile(r"Parser key \"([\w.]+)\"")
_CLASS = re.compile(r"Problem with given class_path '([\w.]+)'")
_CLASS_OF_CALLABLE = re.compile(r"Got value: Namespace\(class_path='([\w.]+)'")
_OF_GROUP = re.compile(r"Group '(\w+)' does not accept option '([^']*)'")
_OPTION = re.compile(r"(?:Option|Subcommand '\w+' does not accept option) '([^']*)'(?: is not accepted|$)")
_MISSING = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'")
_NOT_IMPORTED = re.compile(r"^\s+(No module named '[\w.]+')")
_FUNCTION_NOT_IMPORTED = re.compile(r"callable class: (No module named '[\w.]+')(?:\. Got value: ([\w.]+))?$")
_NO_SUBCLASS = re.compile(r"Import path ([\w.]+) does not correspond to a subclass of (\w+)")
_NO_GROUP = re.compile(r"Unable to load config \"(.*)\"$")
_EXPECTED = re.compile(r"- (?:Expected an?|Not a valid subclass of) (.+)$")
_SUBTYPE = re.compile(r"<class '([\w.]+)'>")
_GIVEN = re.compile(r"^\s+Given value: ")
_VALUE = re.compile(r"Expected a (.+?)\. Got value: (.*?)(?:\. Got value: Namespace\(.*)?$")
_NO_SOURCE = re.compile(r"- Does not implement protocol (\w+)$")
_ARGUMENTS = re.compile(r"unrecognized arguments: (.*)$")
_LITERAL = re.compile(r"typing\.Literal\[(.*)\]$")
_REQUIRED = re.compile(r"the following arguments are required: (.+)$")


def explain(message: str, options: Sequence[str] = ()) -> str | None:
    """Say which name or value is wrong, where, and what would be right. None if the report does not show it.

    Args:
        message: The parser's report.
        options: The options of the command line, such as `--trainer.max_steps`.
    """
    if unrecognized := _ARGUMENTS.match(message):
        return _about_arguments(unrecognized[1].split(), options)
    lines = [line for line in message.splitlines() if line.strip()]
    found = [number for number, line in enumerate(lines) if _sentence(line, None) is not None]
    if not found:
        return _explain_source(lines) or _explain_union(lines)
    # The first of the deepest. A wrong class counts only if nothing else is wrong: another type may take it.
    deepest = max(found, key=lambda number: (not _NO_SUBCLASS.search(lines[number]), _indent(lines[number])))
    above = [lines[deepest], *_ancestors(lines, deepest)]
    keys = [match[1] for line in reversed(above) if (match := _KEY.search(line))]
    classes = [match[1] for line in above if (match := _CLASS.search(line))]
    of_callable = _CLASS_OF_CALLABLE.search(" ".join(lines[deepest : deepest + 2]))
    owner = of_callable[1] if of_callable else next(iter(classes), None)
    sentence = _sentence(lines[deepest], owner, keys[-1] if keys else None)
    return f"{'.'.join(keys)}: {sentence}" if keys else sentence


def cause_of_union(error: Exception) -> Exception:
    """Unwrap the parser's error about a union of types into the constructor's own; return other errors unchanged."""
    cause = error
    while str(cause).startswith(_UNION) and isinstance(cause.__cause__, Exception):
        cause = cause.__cause__
    return error if _raised_in(cause).startswith("jsonargparse.") else cause


def is_refusal(error: Exception) -> bool:
    """Whether this package's own code refused a value, rather than failed."""
    return isinstance(error, ValueError | OSError | ImportError) and _raised_in(error).startswith(PACKAGE + ".")


def _raised_in(error: Exception) -> str:
    """Name of the module that raised an error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1].f_globals.get("__name__", "") if frames else ""


def _explain_source(lines: Sequence[str]) -> str | None:
    """The same for `init_args` merged over a string, which has none."""
    sources = [
        number for number, line in enumerate(lines) if (match := _NO_SOURCE.search(line)) and match[1] in _SOURCES
    ]
    if not sources or not any("Given value: {'init_args': " in line for line in lines[sources[0] :]):
        return None
    keys = [match[1] for line in _ancestors(lines, sources[0]) if (match := _KEY.search(line))]
    source = _SOURCES[lines[sources[0]].split()[-1]]
    return (
        f"{'.'.join(reversed(keys))}: a path alone takes no init_args; write {keys[0]}: {{class_path: {source}, "
        "init_args: {path: ...}}."
    )


def _explain_union(lines: Sequence[str]) -> str | None:
    """The same for a value that fits no type of a union; None if a type failed for any other reason."""
    given = [number for number, line in enumerate(lines) if _GIVEN.search(line)]
    if not given:
        return None
    deepest = max(given, key=lambda number: _indent(lines[number]))
    keys = [match[1] for line in _ancestors(lines, deepest) if (match := _KEY.search(line))]
    tried = [_EXPECTED.search(line) for line in _tried(lines[:deepest], _indent(lines[deepest]))]
    if not keys or not tried or None in tried:
        return None
    names = [name for match in tried if match for name in _type_names(match[1])]
    value = lines[deepest].split(":", 1)[1].strip()
    config = _config_among(lines[:deepest], _indent(lines[deepest]))
    sentence = _not_one_of(value, names, keys[0]) if config is None else _not_a_config(value, config)
    return f"{'.'.join(reversed(keys))}: {sentence}"


def _tried(lines: Sequence[str], indent: int) -> list[str]:
    """The last list of errors at this indentation, one per type."""
    start = max(number for number, line in enumerate(lines) if line == f"{' ' * indent}Errors:")
    return [line for line in lines[start:] if line.startswith(f"{' ' * indent}  - ")]


def _config_among(lines: Sequence[str], indent: int) -> type | None:
    """The dataclass among the types of the last union at this indentation, if there is one."""
    types = [line for line in lines if line.startswith(f"{' ' * indent}Subtypes: ")]
    classes = [locate(name) for name in _SUBTYPE.findall(types[-1])]
    return next((cls for cls in classes if isinstance(cls, type) and is_dataclass(cls)), None)


def _ancestors(lines: Sequence[str], place: int) -> Iterable[str]:
    """The lines above a line in the tree, innermost first."""
    indent = _indent(lines[place])
    for line in reversed(lines[:place]):
        if _indent(line) < indent:
            indent = _indent(line)
            yield line


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _sentence(line: str, owner: str | None, key: str | None = "") -> str | None:
    """Explain a line of the report below a key, which is None at the top."""
    if match := _OF_GROUP.search(line):
        return _about_option(match[2], match[1], owner)
    if match := _OPTION.search(line):
        top = key is None and owner is None and not match[1].startswith("trainer.")
        return _about_top(match[1]) if top else _about_option(match[1], None, owner)
    if match := _MISSING.search(line):
        return f"{match[1]} has no {match[2]!r}{_nearest(match[2], _names_in(match[1]))}"
    if match := _VALUE.search(line):
        return _about_value(match[1], match[2], key)
    return _about_class(line, owner)


def _about_arguments(arguments: Sequence[str], options: Sequence[str]) -> str:
    """Say how options of TRL and verl, and ours without their path, are written on the command line."""
    flags = [number for number, argument in enumerate(arguments) if argument.startswith("--") or "=" in argument]
    for number, end in pairwise([*flags, len(arguments)]):
        name, *value = arguments[number].lstrip("-+").split("=", 1)
        path, note = foreign_path(name), note_on_option(name.split(".")[-1])
        if path is not None:
            shown = "..." if note else " ".join([*value, *arguments[number + 1 : end]]) or "..."
            return f"{arguments[number]} is written --{path} {shown} here.{note} {_TABLES}"
    nearest = [match for n in flags for match in difflib.get_close_matches(arguments[n].split("=")[0], options, n=1)]
    remedy = f"did you mean {nearest[0]}?" if nearest else f"options are written --trainer.max_steps 100. {_TABLES}"
    return f"unrecognized arguments: {' '.join(arguments)}; {remedy}"


def _about_top(name: str) -> str:
    path = None if name.split(".")[0] in AT_TOP else foreign_path(name)
    if path is not None:
        return f"the configuration has no {name!r}; here it is {path}.{note_on_option(name.split('.')[-1])} {_TABLES}"
    return f"the configuration has no {name!r}{_nearest(name.split('.')[0], AT_TOP)}"


def _about_option(option: str, group: str | None, owner: str | None) -> str:
    cls: Any = Trainer if owner is None else locate(owner)
    if cls is None:
        return f"there is no option {option!r}"
    if cls in _EXAMPLES:
        return f"no class_path is given; pass a configuration that has one, or {_EXAMPLES[cls]} before its options"
    name = option.removeprefix("trainer.").split(".")[0]
    if close := difflib.get_close_matches(name, ("class_path", "init_args"), n=1, cutoff=0.8):
        wrong = "" if name in ("class_path", "init_args") else f"{name!r} is not {close[0]!r}; "
        return f"{wrong}a class is written as class_path and init_args, and nothing else"
    cls = config_class(cls, group) if group is not None and owner is not None else cls
    return f"{cls.__name__} takes no {name!r}{suggestion(cls, name, in_yaml=True)}"


def _about_class(line: str, owner: str | None) -> str | None:
    if match := _NOT_IMPORTED.search(line):
        return f"{owner} cannot be imported: {match[1]}{_SEARCHED}"
    if match := _FUNCTION_NOT_IMPORTED.search(line):
        return f"{match[2] or 'the function'} cannot be imported: {match[1]}{_SEARCHED}"
    if match := _NO_SUBCLASS.search(line):
        return f"{match[1]} is not a {match[2]}"
    if match := _NO_GROUP.search(line):
        return f"{match[1]!r} is neither a mapping of options (`name: value`) nor a YAML file"
    if match := _REQUIRED.search(line):
        names = " and ".join(f"init_args.{name}" for name in match[1].split(", "))
        return f"{owner or 'the class'} needs {names}; add it to a configuration or to the command line"
    return None


def _about_value(expected: str, value: str, key: str | None) -> str:
    names = _type_names(expected)
    if len(names) == 1:
        return f"expected {names[0]}, got {value}"
    return _not_one_of(value, names, key)


def _not_one_of(value: str, names: Sequence[str], key: str | None) -> str:
    note = note_on_value(key or "", value)
    return f"{value!r} is not one of {', '.join(names)}{f'.{note}' if note else _nearest(value, names, default='.')}"


def _not_a_config(value: str, config: type) -> str:
    """Say that a value is no mapping, and how it is written if it is a choice of one of the options."""
    hints = get_type_hints(config)
    options = [name for name in field_names(config) if value in get_args(hints[name])]
    remedy = f"; write {{{options[0]}: {value}}}" if options else ""
    return f"{value!r} is not a mapping of the options of {config.__name__} ({', '.join(field_names(config))}){remedy}"


def _type_names(expected: str) -> list[str]:
    """The values of a literal type, or the name of any other."""
    if expected.startswith("dot import path string"):
        return ["class_path"]
    literal = _LITERAL.search(expected)
    if literal is None:
        name = expected.removeprefix("<class ").rstrip(">").strip("'")
        return ["null" if name == "NoneType" else name]
    return [name.strip().strip("'") for name in literal[1].split(",")]


def _names_in(module: str) -> Sequence[str]:
    return getattr(sys.modules.get(module), "__all__", dir(sys.modules.get(module)))


def _nearest(name: str, known: Sequence[str], default: str | None = None) -> str:
    nearest = difflib.get_close_matches(name, known, n=1)
    if nearest:
        return f"; did you mean {nearest[0]!r}?"
    return f"; it has {', '.join(known)}." if default is None else default


# The command line: `fit`, `validate`, `test`, `parity` and `plan`, configured by YAML files that can be stacked.
#
# Constructor arguments are the options; see `python cli.py fit --help`. A configuration names classes to import, so
# it is
# code: run only files that you would run as a script.

CONFIG_FOLDERS = (Path("configs"), *(folder / "configs" for folder in Path(__file__).resolve().parents[1::-1]))
"""Folders that `--config NAME` searches after the path itself: working directory, project, installed package."""

_LONGEST_USAGE = 5
"""Lines of a usage that an error shows."""

_FILE_NAME = re.compile(r"[\w./\\:~-]+")


def find_config(name: str) -> str:
    """Find a configuration by path, or by its name in `configs/`, with or without `.yaml`.

    Args:
        name: A path, a name such as `grpo_pg.yaml` or `strategy/ddp`, or the YAML itself as a string.

    Returns:
        The path of an existing file, or the argument unchanged if it is not a file name (inline YAML).

    Raises:
        TypeError: If no such file exists (the parser turns this into a usage error).
    """
    if not _FILE_NAME.fullmatch(name) or Path(name).is_file():
        return name
    candidates = [folder / f"{name}{suffix}" for folder in CONFIG_FOLDERS for suffix in ("", ".yaml")]
    for candidate in candidates:
        if candidate.is_file():
            return str(candidate)
    places = ", ".join(str(path) for path in (Path(name), *dict.fromkeys(c.parent for c in candidates)))
    raise TypeError(f"--config {name}: no such file; looked at {places}. Pass a path or a name in one of them.")


class ConfigFile(ActionConfigFile):
    """`--config`: may be repeated; later files are merged over earlier ones.

    Attributes:
        texts: The files' contents, each with its path.
    """

    texts: list[tuple[str, str]]

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        """Merge one file into the configuration."""
        found = find_config(values)
        is_file = bool(_FILE_NAME.fullmatch(found))
        text, source = (Path(found).read_text(encoding="utf-8"), found) if is_file else (found, "--config")
        refuse_duplicates(text, source)
        self.texts.append((text, source))
        super().__call__(parser, cfg, found, option_string)


class RLParser(LightningArgumentParser):
    """Lightning's parser without abbreviations, whose errors name the option and the nearest known one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Explain a usage error; parsers of nested classes leave that to the outermost parser."""
        options = [option for action in self._actions for option in action.option_strings]
        explained = explain(message, options) if self.exit_on_error else None
        super().error(message if explained is None else explained, ex)

    def instantiate_classes(self, *args: Any, **kwargs: Any) -> Any:
        """Create the objects; a value that a constructor of this package refuses is a usage error.

        Raises:
            Exception: Any other error of a constructor, as raised there, without the parser's list of arguments.
        """
        try:
            return super().instantiate_classes(*args, **kwargs)
        except Exception as error:
            cause = cause_of_union(error)
        if is_refusal(cause):
            self.exit(2, f"error: {cause}\n")
        raise cause

    def print_usage(self, file: Any = None) -> None:
        """Print the usage if it is short; that of a sub-command is a page, and would hide the error after it."""
        if len(self.format_usage().splitlines()) <= _LONGEST_USAGE:
            super().print_usage(file)


class RLTrainer(Trainer):
    """Lightning's Trainer with two more sub-commands, `parity` and `plan`."""

    def parity(
        self,
        model: LightningModule | str,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> list[ParityReport]:
        """Compare results and gradients of the configured models with shared and with repeated prefixes.

        Args:
            model: A module with a policy, the path or name of a Hugging Face model, or a GGUF file. The backend is the
                module's `attention_backend`, if it has one.
            datamodule: Ignored; accepted so the configuration of a training run works unchanged.
            ckpt_path: Checkpoint whose weights are compared; without it, the weights that training starts from.
            weights_only: As in the other sub-commands; must not be False.

        Returns:
            A report for the policy, and one for a critic with its own backbone; `passed` says whether shared and
            repeated prefixes agree within the dtype's tolerance.
        """
        from pl_grouprl.checks import check_parity

        if weights_only is False:
            raise ValueError("weights_only is False, which would let the checkpoint run code; leave it out.")
        policy = _load_policy(model, ckpt_path)
        reports_of_module: Any = getattr(model, "parity_reports", None)
        if reports_of_module is not None:
            return reports_of_module()
        return [check_parity(policy, backend=getattr(model, "attention_backend", "auto"))]

    def plan(
        self,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        device: str | None = None,
    ) -> RunPlan:
        """Estimate the memory, tokens and time of a run before anything is loaded.

        Args:
            model: A module of this package.
            datamodule: A `PromptDataModule`; its prompts are tokenized.
            device: GPU to estimate the time of a step for: a10, a100, h100, h200, l4, l40s or rtx4090; None is this
                machine's.
        """
        from pl_grouprl.planning import Hardware, plan_run

        self.strategy.connect(model)  # the data module finds the tokenizer through the Trainer
        if datamodule is not None:
            datamodule.trainer = self
            datamodule.setup("fit")
        current = {"precision": self.precision, "devices": self.world_size, "strategy": self.strategy}
        options = current if self.planned_options is None else self.planned_options
        return plan_run(model, datamodule, Hardware.of_trainer(options, device))

    planned_options: dict[str, Any] | None = None
    """Arguments of the Trainer to plan for; None plans for this one."""


def _load_policy(model: LightningModule | str, ckpt_path: str | None) -> Any:
    """The transformers model inside a module, or loaded from a path, in evaluation mode."""
    if isinstance(model, str):
        from pl_grouprl.models.policy import policy_of_path

        if ckpt_path is not None:
            raise ValueError(
                f"ckpt_path is {ckpt_path!r} while model names a Hugging Face model ({model!r}); a checkpoint belongs "
                "to a LightningModule: pass the run's --config instead of --model."
            )
        return policy_of_path(model).load().eval()
    checkpoint = None if ckpt_path is None else load_verified(ckpt_path)
    model.configure_model()
    if checkpoint is not None:
        model.on_load_checkpoint(checkpoint)  # as Lightning does; refuses another base or adapter
        model.load_state_dict(checkpoint["state_dict"])
    policy = getattr(model, "policy", None)
    if policy is None:
        raise ValueError(
            f"model is a {type(model).__name__} without an attribute `policy`; parity compares the transformers model "
            "in a module's attribute of that name. Pass --model PATH to compare a model alone."
        )
    return policy.eval()


class SaveConfig(SaveConfigCallback):
    """Saves the configuration as `config.yaml` in the run folder; an evaluation without a logger saves none."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save the configuration, once.

        Raises:
            OSError: On all ranks, if it cannot be written, or a file not written by this run is there.
        """
        if self.already_saved or (stage != "fit" and not trainer.loggers):
            return
        from pl_grouprl.callbacks.checkpoints import claim, on_rank_zero, run_folder
        from pl_grouprl.utilities.checkpoint_files import explain_os_error

        folder = run_folder(trainer)
        if folder is None:
            return
        file = folder / self.config_filename
        claim(trainer, file, self)

        def save() -> None:
            with explain_os_error(f"The configuration could not be saved in {file}"):
                self.parser.save(self.config, str(file), skip_none=False, multifile=self.multifile)

        on_rank_zero(trainer, save)
        self.already_saved = True


class RLCLI(LightningCLI):
    """LightningCLI for any LightningModule and data module, with configurations by name, `parity` and `plan`.

    Differences from Lightning's: `--config NAME` also looks in `configs/`; a checkpoint's hyper-parameters are never
    merged over the command line; `--ckpt_path last` finds the newest checkpoint of earlier runs of the same name, and
    fails if there is none; where `trainer.precision` is not set, it is `default_precision()`.
    """

    def __init__(self, args: Sequence[str] | None = None) -> None:
        self._preparing: str | None = None
        self._command = next(iter(sys.argv[1:] if args is None else args), None)
        self._config_texts: list[tuple[str, str]] = []
        self._planned_options: dict[str, Any] = {}
        super().__init__(
            LightningModule,
            LightningDataModule,
            trainer_class=RLTrainer,
            parser_class=RLParser,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            seed_everything_default=0,
            save_config_callback=SaveConfig,
            args=None if args is None else list(args),
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The sub-commands, and the arguments of their Trainer methods that are not options."""
        return {
            "fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"},
            "validate": {"model", "dataloaders", "datamodule"},
            "test": {"model", "dataloaders", "datamodule"},
            "parity": {"model", "datamodule"},
            "plan": {"model", "datamodule"},
        }

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """A parser whose `--config` also finds names in `configs/`."""
        kwargs.setdefault("description", "Reinforcement learning of language models with shared prefixes.")
        parser = self.parser_class(**kwargs)
        action = parser.add_argument(
            "-c",
            "--config",
            action=ConfigFile,
            help="Configuration file, by path or by name in configs/; may be repeated, later files win.",
        )
        action.texts = self._config_texts
        return parser

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """Add options only to the sub-command that runs, if the arguments begin with one: each takes 30 ms."""
        if self._command in self.subcommands() and self._command != subcommand:
            self._subcommand_method_arguments[subcommand] = []
            return self.init_parser(**kwargs)
        self._preparing = subcommand
        return super()._prepare_subcommand_parser(klass, subcommand, **kwargs)

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Trainer, model and data; `parity` also takes the path of a Hugging Face model instead of a module."""
        if self._preparing != "parity":
            super().add_core_arguments_to_parser(parser)
            return
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        parser.add_argument(
            "--model",
            type=LightningModule | str,
            required=True,
            help="A module, or the path or name of a Hugging Face model.",
        )
        parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True, required=False)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse; arguments passed from Python replace those of the process."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
            super().parse_arguments(parser, args)
        config = self.config.as_dict()
        for text, source in self._config_texts:
            refuse_unknown_groups(text, source, config.get(self.config.subcommand) or config)

    def before_instantiate_classes(self) -> None:
        """Choose the precision if none is set. For a plan, remove what this machine may lack, so it runs anywhere."""
        options = self.config[self.subcommand]["trainer"]
        if options["precision"] is None and not options["plugins"] and self.subcommand != "parity":
            planned_gpu = (
                self.subcommand == "plan" and self.config["plan"]["device"] and options["accelerator"] != "cpu"
            )
            options["precision"] = "bf16-mixed" if planned_gpu else default_precision(options["accelerator"])
        if self.subcommand == "plan":
            self._planned_options = options.as_dict()
            bare = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto", "precision": None}
            bare |= {"logger": False, "callbacks": None, "enable_checkpointing": False, "plugins": None}
            for name, value in bare.items():
                options[name] = value

    def _parse_ckpt_path(self) -> None:
        """Do nothing: options come from the command line; a checkpoint provides weights and state only."""

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        _refuse_missing_gpu(config.get("accelerator"))
        if config.get("fast_dev_run") and isinstance(config.get("callbacks"), list):
            # ModelCheckpoint(save_last=True) would write into the working directory when training ends.
            config["callbacks"] = [callback for callback in config["callbacks"] if not isinstance(callback, Checkpoint)]
        return super()._instantiate_trainer(config, [*callbacks, *_default_progress_bar(config)])

    def after_instantiate_classes(self) -> None:
        """Prepare the loggers before the first of them creates its folder."""
        prepare_loggers(self.trainer.loggers)

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        if subcommand == "plan":  # takes no checkpoint
            return kwargs
        if kwargs.get("weights_only") is False:
            raise ValueError("weights_only is False, which would let the checkpoint run code; leave it out.")
        kwargs["weights_only"] = True
        if kwargs.get("ckpt_path") == "last":
            kwargs["ckpt_path"] = last_checkpoint(self.trainer, self.model if subcommand == "fit" else None)
        return kwargs

    def parity(self, **kwargs: Any) -> None:
        """Print the reports; exit with 1 on a mismatch."""
        assert isinstance(self.trainer, RLTrainer)
        from pl_grouprl.attention import UnsupportedModelError

        try:
            reports = self.trainer.parity(**kwargs)
        except UnsupportedModelError as refusal:
            sys.exit(f"parity of shared and repeated prefix: refused: {refusal}")  # exit code 1, to stderr
        print(*reports, sep="\n")
        if not all(report.passed for report in reports):
            sys.exit(1)

    def plan(self, **kwargs: Any) -> None:
        """Print the plan."""
        assert isinstance(self.trainer, RLTrainer)
        self.trainer.planned_options = self._planned_options
        try:
            print(self.trainer.plan(**kwargs))
        except (TypeError, ValueError) as error:  # of the configuration: the data, or a model that cannot be planned
            sys.exit(f"no plan: {error}")


def _default_progress_bar(config: dict[str, Any]) -> list[Callback]:
    """Our progress bar, unless the configuration names one or disables it."""
    named = config.get("callbacks") or []
    named = named if isinstance(named, list) else [named]
    if config.get("enable_progress_bar") is False or any(isinstance(callback, ProgressBar) for callback in named):
        return []
    from pl_grouprl.callbacks import RunProgressBar

    return [RunProgressBar()]


def _refuse_missing_gpu(accelerator: Any) -> None:
    """Refuse GPUs that this machine lacks, and name what runs here; Lightning's error does not."""
    if accelerator in ("gpu", "cuda") and not (CUDAAccelerator.is_available() or MPSAccelerator.is_available()):
        raise ValueError(
            f"trainer.accelerator is {accelerator!r} and PyTorch finds no GPU. FSDP1 and DeepSpeed need GPUs; without "
            "them use --trainer.accelerator cpu with no strategy, strategy/ddp.yaml or strategy/fsdp2.yaml."
        )


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; the arguments default to those of the process.

    Those of the process may name classes and functions of modules in the working directory.
    """
    if args is None and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    RLCLI(args)


if __name__ == "__main__":
    main()
