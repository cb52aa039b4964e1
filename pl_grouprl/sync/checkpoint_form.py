"""Converts a model's weights to the names and layout in which transformers saves them.

Transformers 5 stores the weights of some models differently in memory than in checkpoints, such as all experts of a
layer in one tensor. `CheckpointForm` reverses that as `save_pretrained` does, but on a stream: it holds at most the
weights of one conversion.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch import Tensor

from pl_grouprl.utilities import internals

Key = TypeVar("Key", bound=Hashable)


class Gatherer(Generic[Key]):
    """Collects weights until a group is complete.

    Args:
        sizes: Number of weights in each group.
    """

    def __init__(self, sizes: Mapping[Key, int]) -> None:
        self._sizes = sizes
        self._held: dict[Key, dict[str, Tensor]] = {}

    def add(self, group: Key, name: str, weight: Tensor) -> dict[str, Tensor] | None:
        """Add one weight.

        Returns:
            All weights of the group by name if this was the last one (they are then dropped); otherwise None.
        """
        held = self._held.setdefault(group, {})
        held[name] = weight
        return self._held.pop(group) if len(held) == self._sizes[group] else None


def saved_names(model: Any, names: Mapping[str, Hashable]) -> set[str]:
    """Names under which `save_pretrained` saves weights: one each, even for tied weights with several names.

    Args:
        model: A transformers model.
        names: Names of all weights, each with a key shared by all names of a tied weight.

    Raises:
        RuntimeError: If weights are tied but not declared as tied by the model's class, which transformers cannot save.
    """
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    stand_ins = {weight: torch.empty(1) for weight in set(names.values())}
    state = {name: stand_ins[weight] for name, weight in names.items()}
    return remove_tied_weights_from_state_dict(state, model).keys() - internals.unsaved_names(model)


class CheckpointForm:
    """Converts a stream of a model's weights to the contents of its checkpoint.

    Args:
        model: A transformers model. Its tensors are not read.
        names: Names of all weights in the stream.

    Raises:
        ValueError: If the model is quantized, or its form cannot be reversed.
    """

    def __init__(self, model: Any, names: Iterable[str]) -> None:
        self._owner = type(model).__name__
        if getattr(model, "hf_quantizer", None) is not None:
            raise ValueError(
                f"{self._owner} is quantized (quantization_config), so its weights are not those of a checkpoint; "
                "load it without quantization."
            )
        self._conversions = _conversions(model)
        self._config = model.config
        self._converters = self._reversed_converters()
        self._gatherer = Gatherer(Counter(map(self._group, names)))

    def convert(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield names and weights as in a checkpoint; those that need no conversion immediately.

        Raises:
            ValueError: If a weight's form cannot be reversed.
        """
        for name, weight in weights:
            if not self._conversions:
                yield name, weight
            elif (whole := self._gatherer.add(self._group(name), name, weight)) is not None:
                yield from self._reverted(whole)
            del weight

    def _reverted(self, weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        from transformers.core_model_loading import revert_weight_conversion

        structure = _Structure(self._config, self._conversions, weights)
        try:
            reverted = revert_weight_conversion(structure, weights)  # type: ignore[arg-type]
        except _IRREVERSIBLE as error:
            self._refuse(repr(next(iter(weights))), error)
        weights.clear()
        for name in list(reverted):
            yield name, reverted.pop(name)

    def _reversed_converters(self) -> list[Any]:
        """Conversions that change more than names, in the order of `revert_weight_conversion`."""
        from transformers.core_model_loading import WeightConverter

        try:
            backwards = [conversion.reverse_transform() for conversion in reversed(self._conversions)]
        except _IRREVERSIBLE as error:
            self._refuse("weights", error)
        return [conversion for conversion in backwards if isinstance(conversion, WeightConverter)]

    def _group(self, name: str) -> tuple[str, bool]:
        """Key shared by all weights of one conversion: the first name that it writes."""
        for converter in self._converters:  # at most one converts a weight
            target, pattern = converter.rename_source_key(name)
            if pattern is not None:
                return target, True
        return name, False

    def _refuse(self, what: str, error: Exception) -> NoReturn:
        raise ValueError(
            f"{self._owner} stores {what} differently from its checkpoints, and transformers cannot reverse that "
            f"from the weights alone ({type(error).__name__}: {error}); sample with HFRolloutEngine."
        ) from error


_IRREVERSIBLE = (ValueError, NotImplementedError, RuntimeError, TypeError, re.error)
"""Errors that transformers raises for irreversible conversions."""


class _Structure:
    """The parts of a model that conversions may see: its config, and the weights to convert.

    The model itself is never read, because its tensors may be shards.
    """

    def __init__(self, config: Any, conversions: list[Any], weights: dict[str, Tensor]) -> None:
        self.config = config
        self._weight_conversions = conversions
        self._weights = weights

    def get_parameter(self, name: str) -> Tensor:
        if name not in self._weights:
            raise TypeError(f"the conversion reads {name!r} from the model, which may be sharded")
        return self._weights[name]

    def __getattr__(self, name: str) -> NoReturn:
        raise TypeError(f"the conversion reads {name!r} from the model, which may be sharded")


def _conversions(model: Any) -> list[Any]:
    """The conversions from the checkpoint's form to the model's; empty if they are the same."""
    conversions = internals.weight_conversions(model)
    if conversions is not None:
        return conversions
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    # As in `revert_weight_conversion`: a model that was not loaded from a checkpoint is saved without prefixes.
    found = get_model_conversion_mapping(model, add_legacy=False)
    return [conversion for conversion in found if not isinstance(conversion, PrefixChange)]
