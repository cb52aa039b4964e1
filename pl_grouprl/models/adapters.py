"""Low-rank adapters on a frozen model, LoRA (arXiv:2106.09685) and DoRA (arXiv:2402.09353), using PEFT.

The frozen model may have 4 bits per weight (QLoRA, arXiv:2305.14314), using bitsandbytes.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from pl_grouprl.attention import find_decoder
from pl_grouprl.attention.support import base_of
from pl_grouprl.models.loading import check_finite_weights, check_names
from pl_grouprl.utilities import internals, optional
from pl_grouprl.utilities.distributed import derive_seed
from pl_grouprl.utilities.options import check_options

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig

ALL_LINEAR = "all-linear"

_ACTING_OPTIONS = {"alpha": "lora_alpha"} | {
    name: name for name in ("r", "use_rslora", "use_dora", "target_modules", "rank_pattern", "alpha_pattern")
}
"""Options that decide an adapter's effect: our name and PEFT's."""

_KEY_PREFIX = "base_model.model."
"""Prefix of module names in PEFT's files."""


@dataclass(frozen=True)
class LoRAOptions:
    """Which layers get a low-rank adapter, and what kind.

    Attributes:
        r: Rank of the adapter layers.
        alpha: Their output is multiplied by alpha / r.
        dropout: Dropout rate of their input; must be 0, since dropout would make ratios of log-probabilities random.
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
            "r": (self.r >= 1, "at least 1"),
            "alpha": (self.alpha > 0, "larger than 0"),
            "dropout": (self.dropout == 0, "0, since log-probabilities with and without dropout cannot be compared"),
            "target_modules": (bool(self.target_modules), "'all-linear' or names of layers"),
        }
        check_options({f"{owner}.{name}": (getattr(self, name), *check) for name, check in checks.items()})

    def put_on(self, model: Any, name: str, **options: Any) -> None:
        """Add adapter layers to a transformers model, in place, and freeze everything else.

        Args:
            model: A model with or without a head.
            name: Name of the adapter.
            **options: Further options of PEFT's `LoraConfig`.

        Raises:
            ValueError: If the model already has adapters, no layer matches `target_modules`, PEFT would choose other
                layers, or their weights are tied to another module's, so that merging would change that module too.
        """
        from peft import LoraConfig

        targets, argument = self.target_modules, f"{type(self).__name__}.target_modules={self.target_modules!r}"
        chosen: set[str] | None = None  # PEFT evaluates regular expressions
        if targets == ALL_LINEAR or not isinstance(targets, str):
            chosen = _chosen_layers(model, targets, argument)
            # The last parts of the names, as is usual with PEFT, unless those would match other layers too: a vision
            # tower has layers with the same names as the language model.
            ends = {n.rpartition(".")[2] for n in chosen}
            is_clear = chosen == {n for n, _ in model.named_modules() if n.rpartition(".")[2] in ends}
            targets = sorted(ends if is_clear else chosen)
        config = LoraConfig(
            r=self.r,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=targets,
            use_dora=self.use_dora,
            use_rslora=self.use_rslora,
            **options,
        )
        _inject(config, model, name, self.seed)
        layers = set(adapter_layers(model))
        taken = {n for n, module in model.named_modules() if module in layers}
        if chosen is not None and taken != chosen:
            raise ValueError(
                f"{argument} matches {len(chosen)} layers of {type(model).__name__}, but PEFT chooses others, such as "
                f"{min(taken ^ chosen)!r}; omit those names, or pass a regular expression, as for experts."
            )


def _chosen_layers(model: Any, targets: str | list[str], argument: str) -> set[str]:
    """Names of all linear layers of the decoder; or of the layers with these suffixes, there or else anywhere."""
    from transformers.pytorch_utils import Conv1D

    in_decoder = set(find_decoder(model).modules())
    if isinstance(targets, str):
        linear = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear | Conv1D)]
        return {name for name in linear if model.get_submodule(name) in in_decoder}
    chosen: set[str] = set()
    for target in targets:
        found = {n: layer for n, layer in model.named_modules() if n == target or n.endswith(f".{target}")}
        if not found:  # PEFT says nothing if it finds another one
            raise ValueError(f"{argument} matches no layer of {type(model).__name__} with {target!r}.")
        chosen.update([name for name, layer in found.items() if layer in in_decoder] or found)
    return chosen


def _inject(config: LoraConfig, model: Any, name: str, seed: int) -> None:
    """Add adapter layers and freeze everything else.

    The new weights are float32 (or wider) for any dtype of the model, the same on every rank, and leave the global
    random state unchanged.
    """
    from peft import inject_adapter_in_model

    if has_adapters(model):
        raise ValueError(f"{type(model).__name__} already has adapters; merge them, or pass the saved one's path.")
    owners: dict[nn.Parameter, list[str]] = {}
    for full_name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(parameter, []).append(full_name.rpartition(".")[0])
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out")  # PEFT handles GPT2's transposed layers
        warnings.filterwarnings("ignore", ".*tie_word_embeddings")  # an error below if it matters
        torch.manual_seed(derive_seed(f"{name} adapters", seed))
        config.base_model_name_or_path = getattr(model, "name_or_path", None)  # where a saved adapter finds it
        inject_adapter_in_model(config, model, name)
        internals.mark_adapted(model, True)
    for parameter in model.parameters():
        if parameter.requires_grad:  # PEFT creates them in the base weights' dtype, too coarse for training
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
            continue
        tied = owners.get(parameter, [])
        adapted = [owner for owner in tied if len(tied) > 1 and has_adapters(model.get_submodule(owner))]
        if adapted:
            others = [other for other in tied if other != adapted[0]]
            raise ValueError(f"target_modules names {adapted[0]!r}, whose weights are shared with {others}; omit it.")


_KNOWN_OPTIONS = {
    *("r", "lora_alpha", "lora_dropout", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "lora_bias"),
    *("bias", "target_modules", "exclude_modules", "target_parameters", "layers_to_transform", "layers_pattern"),
    *("modules_to_save", "ensure_weight_tying", "fan_in_fan_out", "task_type", "auto_mapping", "peft_version"),
    *("base_model_name_or_path", "revision", "inference_mode"),
}
"""Options of PEFT's `LoraConfig` with which an adapter only adds to its base, whatever their values."""

_KNOWN_INITIALIZATIONS = (True, False, "gaussian", "orthogonal")
"""Values of `init_lora_weights` that leave the base as it is."""


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
        path: Folder or hub name of an adapter in PEFT's format to start from. Its saved options then apply; omit the
            options above, or set them to the same values.
    """

    path: str | None = None

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
            return model
        from peft import LoraConfig, get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict
        from transformers.utils import cached_file

        location, owner = expand_home(self.path), f"the adapter of path {self.path!r}"
        saved = LoraConfig.from_json_file(str(cached_file(location, "adapter_config.json")))
        _check_plain(saved, owner)
        config = LoraConfig(**{name: value for name, value in saved.items() if name in _KNOWN_OPTIONS})
        config.inference_mode = False
        config.lora_dropout = self.dropout
        names = {"alpha": "lora_alpha", "dropout": "lora_dropout"}
        for field in fields(LoRAOptions):
            ours, saved = getattr(self, field.name), getattr(config, names.get(field.name, field.name), None)
            ours, saved = (set(value) if isinstance(value, list) else value for value in (ours, saved))
            if field.name != "seed" and ours not in (field.default, saved):
                raise ValueError(f"LoRAAdapter.{field.name} is {ours!r}, but {owner} was made with {saved!r}; omit it.")
        _inject(config, model, "default", self.seed)

        weights = load_peft_weights(location, device="cpu")
        weights = {name.removeprefix(_KEY_PREFIX): weight for name, weight in weights.items()}
        expected = get_peft_model_state_dict(model, adapter_name="default")
        missing, unexpected = expected.keys() - weights.keys(), weights.keys() - expected.keys()
        shapes = {name: (weights[name].shape, expected[name].shape) for name in weights.keys() & expected.keys()}
        misshaped = {name: pair for name, pair in shapes.items() if pair[0] != pair[1]}
        check_names(f"{owner} does not fit {type(model).__name__}", missing, unexpected, misshaped)
        check_finite_weights(weights, owner)
        set_peft_model_state_dict(model, weights, adapter_name="default")
        return model


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
    """Check that a model's adapters only add to their base, as LoRA and DoRA do.

    Other kinds draw noise, act only on some tokens, need a call per step, or replace the base, which is the reference.

    Args:
        model: Any model, such as a `PeftModel`.
        owner: What it is, for the error.
        trained: Whether the adapters are what is trained.

    Raises:
        ValueError: Names the first unknown option of PEFT; or if nothing is trained although it should be.
    """
    configs = _configs(model)
    for name, config in configs.items():
        _check_plain(vars(config), f"the adapter {name!r} of {owner}")
    if configs and trained and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"no weight of the adapter of {owner} is trained; load it with is_trainable=True.")


def _check_plain(options: dict[str, Any], owner: str) -> None:
    from peft import LoraConfig

    defaults = vars(LoraConfig())
    for name in ("peft_type", *options):
        value = options.get(name)
        known = name in _KNOWN_OPTIONS or (name == "init_lora_weights" and value in _KNOWN_INITIALIZATIONS)
        default = defaults.get(name)  # None for options of newer versions
        if not known and (value or None) != (default or None):
            raise ValueError(
                f"{owner} has {name}={value!r}; pass plain LoRA or DoRA, or merge this one into its model."
            )


def _configs(model: nn.Module) -> dict[str, Any]:
    """PEFT's options of a model's adapters, by the adapters' names."""
    return next((configs for module in model.modules() if (configs := getattr(module, "peft_config", None))), {})


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
    """Expand a leading `~`; hub names and other paths stay unchanged.

    Raises:
        FileNotFoundError: If the path begins with `~`, `.` or `/`, so it is not a name on the hub, and is not there.
    """
    expanded = str(Path(path).expanduser()) if path.startswith("~") else path
    if path.startswith(("~", ".", "/")) and not Path(expanded).exists():
        raise FileNotFoundError(f"there is no folder {path}.")
    return expanded


# Models with PEFT layers: disable the adapters, copy the model without them, merge them into a copy. Copies share the
# storage of every unchanged weight, so they cost next to nothing.


def adapter_layers(model: nn.Module) -> list[Any]:
    """A model's PEFT layers, and modules that PEFT trains in full; empty if PEFT has not been imported."""
    if "peft" not in sys.modules:
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)]


def has_adapters(model: nn.Module) -> bool:
    """Whether a model has PEFT layers."""
    return bool(adapter_layers(model))


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable a model's adapters, and gradients, since activation checkpointing would recompute with adapters.

    On exit, the active adapters and each parameter's `requires_grad` are restored.

    Raises:
        ValueError: If the model has no adapters, or also trains other weights (such as biases), so that disabling the
            adapters would not give the base model.
    """
    layers = adapter_layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no adapters to switch off; score a copy of the base instead.")
    switched = [layer for layer in layers if not layer.disable_adapters]
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for layer in switched:
            layer.enable_adapters(False)  # also freezes them
        other = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        if other:
            more = f"{len(other)} weights besides its adapters, such as {other[0]!r}"
            raise ValueError(f"{type(model).__name__} trains {more}, so it has no base to score; freeze those.")
        with torch.no_grad():
            yield
    finally:
        for layer in switched:
            layer.enable_adapters(True)
        for parameter, requires_grad in trained:
            parameter.requires_grad_(requires_grad)


def aliased_copy(model: nn.Module) -> tuple[Any, dict[nn.Parameter, str]]:
    """Copy a model's modules, not its weights.

    Returns:
        The copy, whose parameters are frozen aliases of the model's storage, and the name of each in the model.
    """
    aliases = {
        id(p): copy.copy(p) if hasattr(p, "quant_state") else nn.Parameter(p.detach(), requires_grad=False)
        for p in model.parameters()
    }
    scales = {id(p.quant_state): p.quant_state for p in model.parameters() if hasattr(p, "quant_state")}
    # The memo makes deepcopy use the aliases, and share the scales of 4-bit weights.
    duplicate = copy.deepcopy(model, {**aliases, **scales})
    return duplicate, {aliases[id(parameter)]: name for name, parameter in model.named_parameters()}


def merged_copy(model: Any, state: dict[str, Tensor] | None = None) -> Any:
    """Copy a model with its active adapters merged into its weights, as a plain transformers model.

    The copy is frozen. Weights without an adapter alias the model's, except those of 4-bit layers, which are
    dequantized first.

    Args:
        model: The model.
        state: The weights to copy, if they are not its own; see `StrategySupport.full_state_dict`.
    """
    duplicate, _ = aliased_copy(base_of(model))
    if state is not None:
        duplicate.load_state_dict(state, assign=True)
    dequantize(duplicate)
    for layer in adapter_layers(duplicate):
        if hasattr(layer, "merge"):
            base = layer.get_base_layer()
            for name, parameter in list(base.named_parameters(recurse=False)):
                setattr(base, name, nn.Parameter(parameter.clone(), requires_grad=False))
            with torch.no_grad():
                layer.merge()
    remove_adapters(duplicate, keep_trained=True)
    return duplicate


def remove_adapters(model: nn.Module, *, keep_trained: bool = False) -> None:
    """Replace PEFT's layers with the layers they wrap.

    Args:
        model: Changed in place.
        keep_trained: Keep the trained version of modules that PEFT trained in full, not the original.

    Raises:
        TypeError: If a wrapper has neither.
    """
    if not has_adapters(model):
        return
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    for name, child in list(model.named_children()):
        if isinstance(child, BaseTunerLayer):
            setattr(model, name, child.get_base_layer())
        elif isinstance(child, ModulesToSaveWrapper):
            trained = child.modules_to_save[child.active_adapters[0]]
            setattr(model, name, trained if keep_trained else child.original_module)
        elif isinstance(child, AuxiliaryTrainingWrapper):
            raise TypeError(f"a {type(child).__name__} of PEFT cannot be removed from {type(model).__name__}.{name}.")
        else:
            remove_adapters(child, keep_trained=keep_trained)
    if "peft_config" in vars(model):
        del model.peft_config  # type: ignore[attr-defined]
        internals.mark_adapted(model, False)


def leave_parameters_out_of_checkpoints(module: nn.Module, names: Iterable[str]) -> None:
    """Omit parameters that are recreated from their source from `state_dict`, of the module and its parents.

    Loading does not report them missing. The hooks are module-level functions, so the module can be pickled.

    Args:
        module: The module that gets the hooks.
        names: Parameter names, as in its `state_dict`.
    """
    names = list(names)
    module.register_state_dict_post_hook(partial(drop_from_state, names))
    module.register_load_state_dict_pre_hook(partial(_fill_in, names))


def leave_frozen_parameters_out_of_checkpoints(module: nn.Module, child: str) -> None:
    """Keep the frozen parameters of a child out of the checkpoints of a module."""
    parameters = getattr(module, child).named_parameters(remove_duplicate=False)
    leave_parameters_out_of_checkpoints(
        module, [f"{child}.{name}" for name, parameter in parameters if not parameter.requires_grad]
    )


def drop_from_state(names: list[str], module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    """A hook that removes parameters, or whole children, from a `state_dict`, made or to be loaded."""
    left_out = {prefix + name for name in names}
    for key in list(state):
        if not left_out.isdisjoint(accumulate(key.split("."), "{}.{}".format)):  # also the scales of 4-bit weights
            del state[key]


def _fill_in(names: list[str], module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name in names:
        state.setdefault(prefix + name, parameters[name])


# Frozen base models in 4 bits.


@dataclass(frozen=True)
class FourBit:
    """How the linear layers of a frozen model are stored: 4 bits per weight, and a scale for every 64 weights.

    Embeddings, norms and the head keep the dtype of the policy.

    Attributes:
        quant_type: `nf4` has levels at the 16-quantiles of a normal distribution, `fp4` is a float of 4 bits.
        double_quant: Store the scales in 8 bits: 4.127 bits per weight instead of 4.5.
        compute_dtype: Dtype in which a layer's weights are dequantized and multiplied.

    Raises:
        ModuleNotFoundError: If bitsandbytes is not installed.
    """

    quant_type: Literal["nf4", "fp4"] = "nf4"
    double_quant: bool = True
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"

    def __post_init__(self) -> None:
        optional.require(optional.BITSANDBYTES_AVAILABLE, "FourBit", "bitsandbytes")

    def config(self) -> BitsAndBytesConfig:
        """The `quantization_config` of `from_pretrained`."""
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=self.quant_type,
            bnb_4bit_use_double_quant=self.double_quant,
            bnb_4bit_compute_dtype=getattr(torch, self.compute_dtype),
        )


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Names and modules of a model's 4-bit layers; none if bitsandbytes has not been imported."""
    if "bitsandbytes" not in sys.modules:
        return
    from bitsandbytes.nn import Linear4bit

    yield from ((name, module) for name, module in model.named_modules() if isinstance(module, Linear4bit))


def is_quantized(model: nn.Module) -> bool:
    """Whether a model has 4-bit layers."""
    return next(quantized_layers(model), None) is not None


def prepare_for_training(model: nn.Module) -> None:
    """Prepare a model with 4-bit layers for an adapter: gradients flow through them, and PEFT recognizes them.

    Does nothing to a model without such layers.
    """
    if not is_quantized(model):
        return
    for _, layer in quantized_layers(model):
        # Disables bitsandbytes' kernel for CPUs with bfloat16 instructions. It rounds to bfloat16, has no gradient, and
        # permanently repacks the weight of a layer in evaluation mode, so later gradients would be zero.
        layer.support_avx512bf16_for_cpu = False
    for module in model.modules():  # every submodel that may get the adapter, not only the loaded model
        if hasattr(module, "get_input_embeddings"):
            module.is_loaded_in_4bit = True  # type: ignore[assignment]


def whole_shape(parameter: Tensor) -> Sequence[int]:
    """A parameter's shape; for a 4-bit one, its shape before packing."""
    state = getattr(parameter, "quant_state", None)
    return parameter.shape if state is None else state.shape


@torch.no_grad()
def dequantize(model: nn.Module) -> None:
    """Replace a model's 4-bit layers, in place, by layers of the original class with the same dequantized weights.

    PEFT's layers around them are converted too, so merging an adapter does not round to 4 bits.
    """
    layers = list(quantized_layers(model))
    if not layers:
        return
    from bitsandbytes.functional import dequantize_4bit
    from peft.tuners import lora
    from transformers.pytorch_utils import Conv1D

    for name, layer in layers:
        weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        plain: nn.Module
        if issubclass(getattr(layer, "source_cls", nn.Linear), Conv1D):  # GPT-2's, transposed for quantization
            plain, weight = Conv1D(layer.out_features, layer.in_features), weight.T.contiguous()
        else:
            plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        plain.weight, plain.bias = nn.Parameter(weight, requires_grad=False), layer.bias
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, plain)
    module: Any
    for module in model.modules():
        if type(module) is lora.Linear4bit:
            module.__class__ = lora.Linear
            is_transposed: Any = isinstance(module.get_base_layer(), Conv1D)
            for part in module.modules():
                if hasattr(part, "fan_in_fan_out"):
                    part.fan_in_fan_out = is_transposed
        if getattr(module, "is_loaded_in_4bit", False):  # with these, transformers will not save or cast a model
            for attribute in ("is_loaded_in_4bit", "is_quantized", "hf_quantizer", "quantization_method"):
                module.__dict__.pop(attribute, None)
            module.config.__dict__.pop("quantization_config", None)
