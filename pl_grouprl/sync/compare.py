"""Verify that a sampler loaded exactly the weights that it was sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from pl_grouprl.sync.checksum import add
from pl_grouprl.sync.sampler import WeightsMismatchError

_NAMED = 5
"""Number of differences that an error lists."""


class LoadedWeight(NamedTuple):
    """One worker's part of one parameter of the sampler.

    Attributes:
        name: The sampler's name of the parameter.
        parts: Names of the sent weights that it consists of.
        checksum: Checksum of this worker's part.
        how: `sum`: workers have shards, whose checksums add up. `copy`: each worker has all of it.
    """

    name: str
    parts: Sequence[str]
    checksum: int
    how: Literal["sum", "copy"]


def check_weights(expected: Mapping[str, int], workers: Iterable[Iterable[Sequence]]) -> None:
    """Verify that a sampler loaded exactly the weights that it was sent.

    Args:
        expected: Checksum of each sent weight, by name, in the sampler's dtype.
        workers: The `LoadedWeight`s of each worker of the sampler, or sequences of their fields.

    Raises:
        WeightsMismatchError: If a parameter was not sent, differs from what was sent, or is missing. Names a few.
    """
    faults: list[str] = []
    arrived: set[str] = set()
    for name, loaded in _by_name(workers).items():
        fault = _fault(expected, loaded)
        if fault is not None:
            faults.append(f"{name} {fault}")
        arrived.update(part for weight in loaded for part in weight.parts)
    faults += [f"{name} was sent, but no parameter contains it" for name in expected if name not in arrived]
    if faults:
        shown = "; ".join(faults[:_NAMED]) + ("; ..." if len(faults) > _NAMED else "")
        raise WeightsMismatchError(
            f"The sampler did not load the policy's weights, {len(faults)} differ: {shown}. Its rollouts must not be "
            "trained on. Start the sampler with the policy's config and dtype, without quantization."
        )


def _by_name(workers: Iterable[Iterable[Sequence]]) -> dict[str, list[LoadedWeight]]:
    found: dict[str, list[LoadedWeight]] = {}
    for worker in workers:
        for fields in worker:
            weight = LoadedWeight(*fields)
            found.setdefault(weight.name, []).append(weight)
    return found


def _fault(expected: Mapping[str, int], loaded: Sequence[LoadedWeight]) -> str | None:
    """What is wrong with one parameter, given all workers' parts of it; None if it is correct."""
    parts = dict.fromkeys(part for weight in loaded for part in weight.parts)
    unknown = [part for part in parts if part not in expected]
    if not all(weight.parts for weight in loaded):
        return "was not sent"
    if unknown:
        return f"contains {unknown[0]}, which was not sent"
    kinds = {weight.how for weight in loaded}
    if kinds == {"sum"}:
        equal = add(*(weight.checksum for weight in loaded)) == add(*(expected[part] for part in parts))
    elif kinds == {"copy"}:
        equal = all(weight.checksum == add(*(expected[part] for part in weight.parts)) for weight in loaded)
    else:
        return f"is stored in different ways ({', '.join(sorted(kinds))})"
    return None if equal else f"differs from what was sent as {' + '.join(parts)}"
