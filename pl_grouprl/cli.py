"""The command line: `fit`, `validate`, `test`, `parity`, `plan`, configured by YAML files that can be stacked; `chat`.

Constructor arguments are the options; see `python cli.py fit --help`. A configuration names classes to import, so it is
code: run only files that you would run as a script.
"""

from __future__ import annotations

import dataclasses
import difflib
import gc
import inspect
import json
import linecache
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from pydoc import locate
from typing import TYPE_CHECKING, Any, Literal, NoReturn
from unittest.mock import patch

import yaml
from jsonargparse import ActionConfigFile, Namespace, auto_cli
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

from pl_grouprl.utilities import optional
from pl_grouprl.utilities.checkpoint_files import last_checkpoint, load_verified
from pl_grouprl.utilities.device_defaults import default_precision
from pl_grouprl.utilities.loggers import prepare_loggers
from pl_grouprl.utilities.options import check_options, nearest_option
from pl_grouprl.utilities.text import describe_error

if TYPE_CHECKING:
    from pl_grouprl.checks import ParityReport
    from pl_grouprl.planning import Rates, RunPlan

CONFIG_FOLDERS = (Path("configs"), *(folder / "configs" for folder in Path(__file__).resolve().parents[1::-1]))
"""Folders that `--config NAME` searches after the path itself: working directory, project, installed package."""

_FILE_NAME = re.compile(r"[\w./\\:~-]+")
_UNKNOWN = re.compile(r"Option '([^']*)' is not accepted|unrecognized arguments: (\S+)|not accept option '([^']*)'")
_CLASS = re.compile(r"class_path(?: |=)'([\w.]+)'")
_MISSING = re.compile(r"module '[\w.]+' has no attribute '\w+'|No module named '[\w.]+'")
_OF_VERL = {
    "adv_estimator": "advantage_estimator of pl_grouprl.GRPO; gae is pl_grouprl.PPO (base/ppo.yaml), and group_ppo is "
    "pl_grouprl.GroupPPO (base/group_ppo.yaml)",
    "group_params": "the options of pl_grouprl.GroupPPO (base/group_ppo.yaml) with the same names",
    "clip_ratio": "epsilon",
    "clip_ratio_low": "epsilon",
    "clip_ratio_high": "epsilon_high",
    "clip_ratio_c": "delta of policy_loss",
    "kl_loss_coef": "beta",
    "lr": "learning_rate of optimizer",
    "n": "num_generations",
    "reward_kwargs": "kwargs",
    "save_freq": "every_n_train_steps of SafeCheckpoint",
    "test_freq": "trainer.val_check_interval",
    "train_batch_size": "batch_size of the data",
}
"""Options of verl whose nearest name here is another option, and what they are."""


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
    """`--config`: may be repeated; later files are merged over earlier ones."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        """Merge one file into the configuration."""
        found = find_config(values)
        is_file = bool(_FILE_NAME.fullmatch(found))
        text, source = (Path(found).read_text(encoding="utf-8"), found) if is_file else (found, "--config")
        try:
            nodes: list[yaml.Node | None] = [yaml.compose(text, Loader=yaml.SafeLoader)]
            given = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise TypeError(f"{source} is not YAML: {error}") from error
        while nodes:  # YAML would silently use the last of duplicate keys
            node = nodes.pop()
            if isinstance(node, yaml.SequenceNode):
                nodes += node.value
            elif isinstance(node, yaml.MappingNode):
                lines: dict[str, int] = {}
                for key, value in node.value:
                    name, line = str(key.value), key.start_mark.line + 1
                    if name in lines and name != "<<":
                        first = lines[name]
                        raise TypeError(f"{source}, line {line}: {name} is a duplicate key, first in line {first}.")
                    lines[name] = line
                    nodes.append(value)
        path = cfg.get("model.init_args.policy")
        for name in ("model", "init_args", "policy"):
            given = given.get(name) if isinstance(given, dict) else None
        if isinstance(path, str) and isinstance(given, dict) and "class_path" not in given:  # sets its `init_args`
            from pl_grouprl.models.loading import split_gguf_path

            location, gguf_file = split_gguf_path(path)
            arguments = Namespace(path=location, gguf_file=gguf_file)
            spec = Namespace(class_path="pl_grouprl.models.PretrainedPolicy", init_args=arguments)
            cfg.update(spec, "model.init_args.policy")
        super().__call__(parser, cfg, found, option_string)


def _origin(error: Exception) -> Exception | None:
    """The error of a constructor that the parser has wrapped; None if the parser itself made it.

    Where a value may have several types, only the frame that raised has the errors of all of them.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    if not frame.f_globals.get("__name__", "").startswith("jsonargparse"):
        return error
    wrapped = frame.f_locals.get("exceptions", [error.__cause__])
    return next(filter(None, map(_origin, filter(None, wrapped))), None)


def _refuses(error: Exception) -> bool:
    """Whether code of this package raised the error on purpose, so that its text is all that a user needs."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    if not frame.f_globals.get("__name__", "").startswith("pl_grouprl."):
        return False
    is_raised = linecache.getline(frame.f_code.co_filename, line).lstrip().startswith("raise ")
    return isinstance(error, OSError | ImportError) or (isinstance(error, TypeError | ValueError) and is_raised)


class RLParser(LightningArgumentParser):
    """Lightning's parser without abbreviations; its errors end with the nearest option, or with what is missing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Report a usage error, with the option that was probably meant."""
        unknown = _UNKNOWN.search(message)
        if unknown and self.exit_on_error:  # parsers of nested classes leave this to the outermost
            given = next(filter(None, unknown.groups()))
            above = message[: message.find("\n", unknown.end())]  # its own line may name the class of a callable
            classes = [locate(name) for name in _CLASS.findall(above)]
            nearest: str | None
            if classes and inspect.isclass(classes[-1]):
                nearest = nearest_option(classes[-1], given)
            else:
                options = [option for action in self._actions for option in action.option_strings]
                nearest = next(iter(difflib.get_close_matches(given, options, n=1)), None)
            if known := [name for name in re.split(r"[.=]", given) if name in _OF_VERL]:
                message += f"\n  verl's {known[0]} is {_OF_VERL[known[0]]}."
            elif nearest is not None:
                message += f"\n  Did you mean {nearest!r}? docs/options.md maps the options of TRL and verl."
        elif self.exit_on_error and (missing := _MISSING.search(message)):  # last, where it is read
            message += f"\n  {missing[0]}; check the import path, and what it imports."
        super().error(message, ex)

    def instantiate_classes(self, *args: Any, **kwargs: Any) -> Any:
        """Create the objects; a value that a constructor of this package rejects is a usage error.

        Raises:
            Exception: Any other error of a constructor, as raised there, without the parser's list of arguments.
        """
        try:
            return super().instantiate_classes(*args, **kwargs)
        except Exception as error:
            cause = _origin(error) or error
        if _refuses(cause):
            self.exit(2, f"error: {cause}\n")
        raise cause

    def print_usage(self, file: Any = None) -> None:
        """Print nothing: a sub-command's usage is a page long and would hide the error; `--help` shows it."""


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
                module's `sharing.backend`, if it has one.
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
        if isinstance(model, str):
            from pl_grouprl.models.policy import policy_of_path

            if ckpt_path is not None:
                raise ValueError(f"ckpt_path is {ckpt_path!r}, but model is a path; pass --config instead of --model.")
            whole: Any = policy_of_path(model).load()
            return [check_parity(whole.eval())]
        checkpoint = None if ckpt_path is None else load_verified(ckpt_path)
        model.configure_model()
        if checkpoint is not None:
            model.on_load_checkpoint(checkpoint)  # as Lightning does; refuses another base or adapter
            model.load_state_dict(checkpoint["state_dict"])
        policy: Any = getattr(model, "policy", None)
        if policy is None:
            raise ValueError(f"model is a {type(model).__name__} without a `policy`; pass --model PATH instead.")
        policy.eval()
        reports_of_module: Any = getattr(model, "parity_reports", None)
        if reports_of_module is not None:
            return reports_of_module()
        return [check_parity(policy, backend=getattr(getattr(model, "sharing", None), "backend", "auto"))]

    def plan(
        self,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        device: str | None = None,
        gpus: str | None = None,
        nodes: str | None = None,
        servers: str | None = None,
        rates: Rates | None = None,
    ) -> RunPlan:
        """Estimate whether a run fits, and the time of a step, before anything is loaded.

        Args:
            model: A module of this package.
            datamodule: A `PromptDataModule`; at most about 2,000 of its prompts are tokenized, including the longest.
            device: GPU to plan for: a10, a100, h100, h100-nvl, h100-pcie, h200, l4, l40, l40s or rtx4090; defaults to
                this machine's, or to the CPU if `trainer.accelerator` is `cpu`.
            gpus: GPUs that train on each node, such as `1,8`: a row of the table for each; defaults to
                `trainer.devices`.
            nodes: Nodes, likewise; defaults to `trainer.num_nodes`.
            servers: Further GPUs that only sample, likewise; defaults to as many as the engine has `urls`.
            rates: Measured rates of the GPU. A JSON file of them is a `--config`: `{"rates": {...}}`.

        Raises:
            ValueError: If `gpus`, `nodes` or `servers` are not numbers.
        """
        from pl_grouprl.planning import Hardware, plan_run

        numbers = {}
        for name, given in (("gpus", gpus), ("nodes", nodes), ("servers", servers)):
            if not re.fullmatch(r"(\d+(,\d+)*)?", given or ""):
                raise ValueError(f"{name} is {given!r}; pass numbers such as 1,8.")
            numbers[name] = [int(number) for number in (given or "").split(",") if number]
        current = {"precision": self.precision, "devices": self.world_size, "strategy": self.strategy}
        options = current if self.planned_options is None else self.planned_options
        hardware = Hardware.of_trainer(options, device)
        self.strategy.connect(model)  # the data module finds the tokenizer through the Trainer
        if datamodule is not None:
            datamodule.trainer = self
        return plan_run(model, datamodule, hardware, **numbers, rates=rates)

    planned_options: dict[str, Any] | None = None
    """Arguments of the Trainer to plan for; None plans for this one."""


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

        folder = run_folder(trainer)
        if folder is None:
            return
        file = folder / self.config_filename
        claim(trainer, file, self)

        def save() -> None:
            self.parser.save(self.config, str(file), skip_none=False, multifile=self.multifile)

        on_rank_zero(trainer, save, f"The configuration could not be saved in {file}")
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
            load_from_checkpoint_support=self._command != "plan",  # a plan saves no hyper-parameters
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
        kwargs.setdefault(
            "description",
            "Reinforcement learning of language models with shared prefixes. `chat --policy PATH` talks to a policy.",
        )
        parser = self.parser_class(**kwargs)
        parser.add_argument(
            "-c",
            "--config",
            action=ConfigFile,
            help="Configuration file, by path or by name in configs/; may be repeated, later files win.",
        )
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

    def before_instantiate_classes(self) -> None:
        """Choose the precision if none is set. For a plan, remove what this machine may lack, so it runs anywhere."""
        options = self.config[self.subcommand]["trainer"]
        if options["precision"] is None and not options["plugins"] and self.subcommand != "parity":
            on_gpu = self.subcommand == "plan" and (self.config["plan"]["device"] or options["accelerator"] != "cpu")
            options["precision"] = "bf16-mixed" if on_gpu else default_precision(options["accelerator"])
        if self.subcommand == "plan":
            self._planned_options = options.as_dict()
            bare = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto", "precision": None}
            bare |= {"logger": False, "callbacks": None, "enable_checkpointing": False, "plugins": None}
            for name, value in bare.items():
                options[name] = value

    def instantiate_classes(self) -> None:
        """Create the objects. A plan starts no engine, so it needs no vLLM."""
        with patch.object(optional, "VLLM_AVAILABLE", optional.VLLM_AVAILABLE or self.subcommand == "plan"):
            super().instantiate_classes()

    def _parse_ckpt_path(self) -> None:
        """Do nothing: options come from the command line; a checkpoint provides weights and state only."""

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        if config.get("fast_dev_run") and isinstance(config.get("callbacks"), list):
            # ModelCheckpoint(save_last=True) would write into the working directory when training ends.
            config["callbacks"] = [callback for callback in config["callbacks"] if not isinstance(callback, Checkpoint)]
        named = config.get("callbacks") or []
        named = named if isinstance(named, list) else [named]
        if config.get("enable_progress_bar") is not False and not any(isinstance(c, ProgressBar) for c in named):
            from pl_grouprl.callbacks import RunProgressBar

            callbacks = [*callbacks, RunProgressBar()]
        return super()._instantiate_trainer(config, callbacks)

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
        except (ImportError, OSError, TypeError, ValueError) as error:  # files, data, or a model that cannot be planned
            sys.exit(f"no plan: {describe_error(error).splitlines()[0]}")


def chat(
    policy: str,
    system: str | None = None,
    max_new_tokens: int = 1024,
    temperature: float | None = None,
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "auto",
    trust_remote_code: bool = False,
) -> None:
    """Talk to a policy in the terminal: an export, an adapter, any model with a folder or a name on the hub.

    Lines come from standard input, and answers are written as they are sampled. `/clear` begins a new conversation;
    Ctrl-D ends. A tokenizer without a chat template gets each line as it is, without those before.

    Args:
        policy: Folder of an export or of an adapter, GGUF file, or name on the hub.
        system: First message of each conversation, if any.
        max_new_tokens: Maximum length of an answer, in tokens.
        temperature: 0 takes the likeliest token; defaults to the model's `generation_config`.
        dtype: Of the weights; `auto` keeps the files' dtype.
        trust_remote_code: Run model code that comes with the policy.

    Raises:
        ValueError: If an option is out of range.
        OSError: If there is no such policy.
    """
    check_options(
        {
            "max_new_tokens": (max_new_tokens, max_new_tokens >= 1, "at least 1"),
            "temperature": (temperature, temperature is None or temperature >= 0, "0 or larger"),
        }
    )
    import torch
    from transformers import TextStreamer
    from transformers.utils import find_adapter_config_file

    from pl_grouprl.models.adapters import LoRAAdapter
    from pl_grouprl.models.policy import policy_of_path

    source: Any = dataclasses.replace(policy_of_path(policy), dtype=dtype, trust_remote_code=trust_remote_code)
    tokenizer = source.load_tokenizer()
    adapter = None if source.gguf_file else find_adapter_config_file(policy)
    if adapter is not None:
        base = json.loads(Path(adapter).read_text(encoding="utf-8"))["base_model_name_or_path"]
        source = dataclasses.replace(source, path=base, adapter=LoRAAdapter(path=policy))
    model: Any = source.load().eval().to(torch.accelerator.current_accelerator() or "cpu")
    sampling: dict[str, Any] = {} if temperature is None else {"do_sample": temperature > 0}
    if temperature:
        sampling["temperature"] = temperature
    start = [] if system is None else [{"role": "system", "content": system}]
    messages = list(start)
    while True:
        try:
            line = input("> ")
        except EOFError:
            return
        if line.strip() == "/clear":
            messages = list(start)
        elif line.strip():
            messages.append({"role": "user", "content": line})
            if tokenizer.chat_template is None:
                inputs = tokenizer(line, return_tensors="pt")
            else:
                inputs = tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
                )
            inputs = inputs.to(model.device)
            streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
            tokens = model.generate(**inputs, max_new_tokens=max_new_tokens, streamer=streamer, **sampling)
            answer = tokens[0, inputs["input_ids"].shape[1] :]
            messages.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; the arguments default to those of the process.

    Those of the process may name classes and functions of modules in the working directory.
    """
    if args is None:
        gc.freeze()  # what is imported stays, so that no collection has to visit it
        gc.enable()
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    given = sys.argv[1:] if args is None else list(args)
    if given[:1] == ["chat"]:
        try:
            auto_cli(chat, args=given[1:], as_positional=False, prog="cli.py chat")
        except (OSError, ValueError) as error:
            sys.exit(f"no chat: {error}")
    else:
        if args is None and given[:1] == ["plan"]:  # nothing but the plan
            for name in ("lightning.fabric", "lightning.pytorch"):
                logging.getLogger(name).setLevel(logging.WARNING)
        try:
            RLCLI(args)
        except Exception as error:
            functions = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
            if "setup" in functions and _refuses(error) and error.__cause__ is None:
                sys.exit(f"error: {error}")  # of a callback, the module or the data, before anything has run
            raise


if __name__ == "__main__":
    main()
