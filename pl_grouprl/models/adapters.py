"""Low-rank adapters on a frozen model, LoRA (arXiv:2106.09685) and DoRA (arXiv:2402.09353), using PEFT."""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from pl_grouprl.attention import find_decoder
from pl_grouprl.models.adapter_layers import adapter_layers, has_adapters
from pl_grouprl.models.loading import WeightMismatch, check_finite_weights, check_mismatch, readable_weights
from pl_grouprl.utilities import internals, optional
from pl_grouprl.utilities.arguments import checked_arguments
from pl_grouprl.utilities.distributed import derive_seed
from pl_grouprl.utilities.options import check_options

if TYPE_CHECKING:
    from peft import LoraConfig

ALL_LINEAR = "all-linear"

_ACTING_OPTIONS = {"alpha": "lora_alpha"} | {
    name: name for name in ("r", "use_rslora", "use_dora", "target_modules", "rank_pattern", "alpha_pattern")
}
"""Options that decide an adapter's effect: our name and PEFT's."""

_KEY_PREFIX = "base_model.model."
"""Prefix of module names in PEFT's files."""


@checked_arguments
@dataclass(frozen=True)
class LoRAOptions:
    """Which layers get a low-rank adapter, and what kind.

    Attributes:
        r: Rank of the adapter layers.
        alpha: Their output is multiplied by alpha / r.
        dropout: Dropout rate of their input: 0, as ratios of log-probabilities with dropout differ from 1 by chance.
        target_modules: `all-linear` for every linear layer of the language model's decoder; or suffixes of layer names,
            looked up in the decoder first, then elsewhere; or a regular expression for full names, as in PEFT. Experts
            stored in one parameter are not linear layers.
        use_dora: Also learn the norms of the weights' columns (DoRA).
        use_rslora: Multiply by alpha / sqrt(r) instead (rank-stabilized LoRA, arXiv:2312.03732).
        seed: Seed of the new layers.

    Raises:
        ModuleNotFoundError: If PEFT is not installed.
        ValueError: If an option is out of range.
    """

    r: int = 16
    alpha: int = 32
    dropout: float = 0.0
    target_modules: str | list[str] = ALL_LINEAR
    use_dora: bool = False
    use_rslora: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        owner = type(self).__name__
        optional.require(optional.PEFT_AVAILABLE, owner, "lora")
        checks = {
            "r": (isinstance(self.r, int) and self.r >= 1, "an integer of at least 1"),
            "alpha": (0 < self.alpha < math.inf, "larger than 0, and finite"),
            "dropout": (self.dropout == 0, "0, since log-probabilities with and without dropout cannot be compared"),
            "target_modules": (bool(self.target_modules), "'all-linear' or names of layers"),
        }
        check_options({f"{owner}.{name}": (getattr(self, name), *check) for name, check in checks.items()})

    def put_on(self, model: Any, name: str, **options: Any) -> None:
        """Add adapter layers to a transformers model, in place, and freeze everything else; see `inject`.

        Args:
            model: A model with or without a head.
            name: Name of the adapter.
            **options: Further options of PEFT's `LoraConfig`.

        Raises:
            ValueError: If no layer matches `target_modules`, or PEFT would choose other layers; see also `inject`.
        """
        from peft import LoraConfig

        argument = f"{type(self).__name__}.target_modules={self.target_modules!r}"
        chosen = _chosen_layers(model, self.target_modules, argument)
        config = LoraConfig(
            r=self.r,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=self.target_modules if chosen is None else _shortest_names(model, chosen),
            use_dora=self.use_dora,
            use_rslora=self.use_rslora,
            **options,
        )
        inject(config, model, name, seed=self.seed, argument=argument)
        layers = set(adapter_layers(model))
        taken = {name for name, module in model.named_modules() if module in layers}
        if chosen is not None and taken != chosen:
            raise ValueError(
                f"{argument} matches {len(chosen)} layers of "
                f"{type(model).__name__}, but PEFT chooses others, such as {min(taken ^ chosen)!r}: it takes names of "
                "an expert's layers for the parameters that contain all experts. Leave out those names, or pass a "
                "regular expression that matches the experts."
            )


_KNOWN_OPTIONS = {
    *("r", "lora_alpha", "lora_dropout", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "lora_bias"),
    *("bias", "target_modules", "exclude_modules", "target_parameters", "layers_to_transform", "layers_pattern"),
    *("modules_to_save", "ensure_weight_tying", "fan_in_fan_out", "task_type", "auto_mapping", "peft_version"),
    *("base_model_name_or_path", "revision", "inference_mode"),
}
"""Options of PEFT's `LoraConfig` with which an adapter only adds to its base, whatever their values."""

_KNOWN_INITIALIZATIONS = (True, False, "gaussian", "orthogonal")
"""Values of `init_lora_weights` that leave the base as it is."""


@checked_arguments
@dataclass(frozen=True)
class LoRAAdapter(LoRAOptions):
    """A policy's adapter, trained instead of its weights.

    Attributes:
        r: See `LoRAOptions`, also for the options down to `seed`.
        alpha: The adapter's output is multiplied by alpha / r.
        dropout: Dropout rate of its input: 0, also for an adapter of `path` that was saved with another.
        target_modules: `all-linear`, suffixes of layer names, or a regular expression.
        use_dora: Also learn the norms of the weights' columns (DoRA).
        use_rslora: Multiply by alpha / sqrt(r) instead.
        seed: Seed of the new layers.
        path: Folder or hub name of an adapter in PEFT's format to start from. Its saved options then apply; leave the
            options above out, or set them to the same values.
    """

    path: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path is not None:
            check_folder(self.path, "adapter path")

    def add_to(self, model: Any) -> Any:
        """Add the adapter to a transformers model, in place, and freeze everything else.

        Returns:
            The model itself.

        Raises:
            ValueError: If the model already has adapters, no layer matches `target_modules`, or the adapter of `path`
                contradicts the options or does not fit the model.
        """
        if self.path is None:
            self.put_on(model, "default", task_type="CAUSAL_LM")
        else:
            config, argument = self._saved_config(self.path), f"the adapter of path={self.path!r}"
            inject(config, model, "default", seed=self.seed, argument=argument)
            _load_weights(model, self.path, "default")
        return model

    def _saved_config(self, path: str) -> LoraConfig:
        from peft import LoraConfig
        from transformers.utils import cached_file

        location, owner = expand_home(path), f"the adapter of path {path!r}"
        with readable_weights(location, owner):
            saved = LoraConfig.from_json_file(str(cached_file(location, "adapter_config.json")))
        _check_options(saved, owner)
        config = LoraConfig(**{name: value for name, value in saved.items() if name in _KNOWN_OPTIONS})
        config.inference_mode = False
        config.lora_dropout = self.dropout
        names = {"alpha": "lora_alpha", "dropout": "lora_dropout"}
        for field in fields(LoRAOptions):
            ours, saved = getattr(self, field.name), getattr(config, names.get(field.name, field.name), None)
            ours, saved = (set(value) if isinstance(value, list) else value for value in (ours, saved))
            if field.name != "seed" and ours not in (field.default, saved):
                raise ValueError(
                    f"{type(self).__name__}.{field.name} is {ours!r}, but the adapter of path {path!r} was made with "
                    f"{saved!r}; leave it out."
                )
        return config


def adapter_options(model: nn.Module) -> dict[str, Any]:
    """Options that affect what a model's adapters compute, as plain values.

    Args:
        model: Any model; without adapters, the result is empty.

    Returns:
        By `<adapter name>.<option>`: the options of `LoRAOptions` that matter outside training, and PEFT's per-layer
        exceptions. Layer names are sorted, and `all-linear` is expanded.
    """
    return {
        f"{name}.{option}": sorted(value) if isinstance(value, set | list) else value
        for name, config in _configs(model).items()
        for option, attribute in _ACTING_OPTIONS.items()
        if (value := getattr(config, attribute, None)) not in (None, {})
    }


def check_adapters(model: nn.Module, owner: str, *, trained: bool = False) -> None:
    """Refuse adapters of a model that are not known to only add to their base, as LoRA and DoRA do.

    Others draw noise, act on some tokens only, need a call per step, or replace the base that is the reference.

    Args:
        model: Any model, such as a `PeftModel`.
        owner: What it is, for the error.
        trained: Whether the adapters are what is trained.

    Raises:
        ValueError: Names the first option of PEFT's that is not known; or if nothing is trained that should be.
    """
    configs = _configs(model)
    for name, config in configs.items():
        _check_options(vars(config), f"the adapter {name!r} of {owner}")
    if configs and trained and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"no weight of the adapter of {owner} is trained; load it with is_trainable=True.")


def _check_options(options: dict[str, Any], owner: str) -> None:
    from peft import LoraConfig

    defaults = vars(LoraConfig())
    for name in ("peft_type", *options):
        value = options.get(name)
        known = name in _KNOWN_OPTIONS or (name == "init_lora_weights" and value in _KNOWN_INITIALIZATIONS)
        default = defaults.get(name)  # None for options of newer versions
        if not known and (value or None) != (default or None):
            raise ValueError(
                f"{owner} has {name}={value!r}, which is not known to train as plain LoRA or DoRA does; pass a "
                "plain one, or merge this one into its model (merge_and_unload of PEFT) and pass that."
            )


def _configs(model: nn.Module) -> dict[str, Any]:
    """PEFT's options of a model's adapters, by the adapters' names."""
    return next((configs for module in model.modules() if (configs := getattr(module, "peft_config", None))), {})


def inject(config: LoraConfig, model: Any, name: str, *, seed: int, argument: str) -> None:
    """Add adapter layers to a transformers model, in place, and freeze everything else.

    The new weights are float32 (or wider) for any dtype of the model, the same on every rank, and leave the global
    random state unchanged.

    Args:
        config: PEFT's options.
        model: A transformers model, with or without a head.
        name: Name of the adapter.
        seed: Seed of its weights.
        argument: The option that names the layers, for errors.

    Raises:
        ValueError: If the model already has adapters, no layer has one of the names, a layer cannot take an adapter,
            or its weights are tied to another module's, so that merging would change that module too.
    """
    if has_adapters(model):
        raise ValueError(
            f"{type(model).__name__} already has adapters; merge them into its weights (merge_and_unload of PEFT, or "
            "ExportPolicy), or pass the path of the saved adapter to continue training it."
        )
    from peft import inject_adapter_in_model

    owners = _owners(model)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out")  # PEFT handles GPT2's transposed layers
        warnings.filterwarnings("ignore", ".*tie_word_embeddings")  # refused below if it matters
        torch.manual_seed(derive_seed(f"{name} adapters", seed))
        try:
            config.base_model_name_or_path = getattr(model, "name_or_path", None)  # where a saved adapter finds it
            inject_adapter_in_model(config, model, name)
            internals.mark_adapted(model, True)
        except (ValueError, re.error) as error:
            _refuse_targets(argument, f"PEFT refuses it for {type(model).__name__} ({error})", error)
    for parameter in model.parameters():
        if parameter.requires_grad:  # PEFT creates them in the base weights' dtype, too coarse for training
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
        elif len(owners.get(parameter, ())) > 1:
            _refuse_tied(model, parameter, owners[parameter])


def _owners(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Names of the modules that have each parameter."""
    owners: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(parameter, []).append(name.rpartition(".")[0])
    return owners


def _refuse_tied(model: nn.Module, parameter: nn.Parameter, owners: list[str]) -> None:
    for name in owners:
        layer = model.get_submodule(name)
        if has_adapters(layer):
            raise ValueError(
                f"target_modules names {name!r}, whose weights are shared with "
                f"{[other for other in owners if other != name]} (tie_word_embeddings); leave it out."
            )


def _chosen_layers(model: Any, targets: str | list[str], argument: str) -> set[str] | None:
    """Names of the layers to adapt; None for a regular expression, which PEFT evaluates."""
    if isinstance(targets, str) and targets != ALL_LINEAR:
        return None
    inside = set(find_decoder(model).modules())
    if targets == ALL_LINEAR:
        chosen = {name for name, module in model.named_modules() if module in inside and _is_linear(module)}
    else:
        in_decoder = {name: module in inside for name, module in model.named_modules() if name}
        found = {target: _find(in_decoder, target) for target in targets}
        if missing := [target for target in targets if not found[target]]:
            _refuse_targets(argument, f"no layer of {type(model).__name__} is named {missing[0]!r}")
        chosen = {name for names in found.values() for name in names}
    if not chosen:
        _refuse_targets(argument, f"{type(find_decoder(model)).__name__} has no linear layers")
    return chosen


def _shortest_names(model: nn.Module, chosen: set[str]) -> list[str]:
    """Shorten names to their last parts, as is usual with PEFT, unless those would match other layers too.

    A vision tower has layers with the same names as the language model.
    """
    ends = {name.rpartition(".")[2] for name in chosen}
    matched = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in ends}
    return sorted(ends if matched == chosen else chosen)


def _find(in_decoder: dict[str, bool], target: str) -> list[str]:
    """Modules whose names end in a target: in the decoder, or elsewhere if the decoder has none."""
    found = [name for name in in_decoder if name == target or name.endswith(f".{target}")]
    return [name for name in found if in_decoder[name]] or found


def _refuse_targets(argument: str, reason: str, error: Exception | None = None) -> NoReturn:
    raise ValueError(
        f"{argument} matches no layer: {reason}. target_modules are 'all-linear', a list of suffixes of names of "
        "linear layers (['q_proj']), or a regular expression for full names ('.*q_proj')."
    ) from error


def _is_linear(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def _load_weights(model: Any, path: str, name: str) -> None:
    """Load an adapter's weights; they must match the model's adapter and be finite."""
    from peft import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict

    location, owner = expand_home(path), f"the adapter of path {path!r}"
    with readable_weights(location, owner):
        saved = load_peft_weights(location, device="cpu")
    state = {key.removeprefix(_KEY_PREFIX): value for key, value in saved.items()}
    expected = get_peft_model_state_dict(model, adapter_name=name)
    mismatch = WeightMismatch(
        tuple(expected.keys() - state.keys()),
        tuple(state.keys() - expected.keys()),
        {
            key: (state[key].shape, expected[key].shape)
            for key in state.keys() & expected.keys()
            if state[key].shape != expected[key].shape
        },
    )
    remedy = "Pass the base model that it was trained on, and all of its files."
    check_mismatch(mismatch, f"{owner} does not fit {type(model).__name__}", remedy=remedy)
    check_finite_weights(state, owner)
    set_peft_model_state_dict(model, state, adapter_name=name)


def save_adapter(model: Any, folder: Path, state: dict[str, Tensor] | None = None) -> None:
    """Save a model's active adapter to a folder in PEFT's format, as `PeftModel.save_pretrained` does.

    Args:
        model: A transformers model with an active adapter.
        folder: Created if missing.
        state: The model's weights, if they are not its own.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    (name,) = adapter_layers(model)[0].active_adapters
    weights = get_peft_model_state_dict(model, state_dict=state, adapter_name=name)
    folder.mkdir(parents=True, exist_ok=True)
    saved = {f"{_KEY_PREFIX}{key}": weight.detach().contiguous() for key, weight in weights.items()}
    save_file(saved, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    model.peft_config[name].save_pretrained(str(folder))


def expand_home(path: str) -> str:
    """Expand a leading `~`; hub names and other paths stay unchanged."""
    return str(Path(path).expanduser()) if path.startswith("~") else path


def check_folder(path: str, what: str) -> None:
    """Refuse a path that is not a folder and cannot be a hub name.

    Raises:
        FileNotFoundError: Says what the path is for.
    """
    if path.startswith((".", "/", "~")) and not Path(path).expanduser().is_dir():
        raise FileNotFoundError(
            f"{what} {path!r} is not a folder; pass a folder written by save_pretrained or a hub name."
        )
