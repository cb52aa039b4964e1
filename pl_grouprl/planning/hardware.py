"""The hardware that a run is planned for, its precision and strategy, and the rates of known devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class DeviceRates(NamedTuple):
    """Data sheet figures of a device.

    Attributes:
        gib: Memory in GiB.
        operations: Dense 16-bit operations per second.
        bandwidth: Bytes read from its memory per second.
    """

    gib: int
    operations: float
    bandwidth: float


DEVICES: dict[str, DeviceRates] = {
    "a10": DeviceRates(24, 125e12, 600e9),
    "a100": DeviceRates(80, 312e12, 2039e9),
    "h100": DeviceRates(80, 989e12, 3350e9),
    "h200": DeviceRates(141, 989e12, 4800e9),
    "l4": DeviceRates(24, 121e12, 300e9),
    "l40s": DeviceRates(48, 362e12, 864e9),
    "rtx4090": DeviceRates(24, 165e12, 1008e9),
}
"""From NVIDIA's data sheets; A100 (80 GB), H100 and H200 as SXM modules."""

_CLASSES = {
    "SingleDeviceStrategy": "single",
    "DDPStrategy": "ddp",
    "FSDPStrategy": "fsdp",
    "ModelParallelStrategy": "fsdp2",
}

KNOWN = ("single", "ddp", "fsdp", "fsdp2", "deepspeed_stage_2", "deepspeed_stage_3")


@dataclass(frozen=True)
class Hardware:
    """What a plan needs to know about a Trainer.

    Attributes:
        precision: As in Lightning.
        processes: Devices on all nodes.
        strategy: One of `KNOWN`.
        device: A name in `DEVICES`; None if its rates are not known.

    Raises:
        ValueError: If the strategy or the device is unknown.
    """

    precision: str = "32-true"
    processes: int = 1
    strategy: str = "single"
    device: str | None = None

    def __post_init__(self) -> None:
        for name, value, known in (("strategy", self.strategy, KNOWN), ("device", self.device, (None, *DEVICES))):
            if value not in known:
                raise ValueError(f"{name} is {value!r}; `plan` knows {', '.join(str(choice) for choice in known)}.")

    @classmethod
    def of_trainer(cls, options: Mapping[str, Any], device: str | None = None) -> Hardware:
        """Read a Trainer's options from a configuration.

        Args:
            options: The Trainer's arguments.
            device: A name in `DEVICES`; None recognizes this machine's GPU.
        """
        devices, on_cpu = options.get("devices"), options.get("accelerator") == "cpu"
        if on_cpu and devices in (None, "auto"):
            devices = 1
        processes = count_devices(devices) * (options.get("num_nodes") or 1)
        precision = str(options.get("precision") or "32-true")
        strategy = strategy_name(options.get("strategy") or "auto", processes)
        return cls(precision, processes, strategy, device or (None if on_cpu else local_device()))


def count_devices(devices: Any) -> int:
    """Number of devices for a Trainer's `devices`; `auto` means all GPUs of this machine, or one device."""
    if isinstance(devices, list | tuple):
        return len(devices)
    if devices in (None, "auto", -1, "-1"):
        return max(torch.cuda.device_count(), 1)
    return len(devices.split(",")) if isinstance(devices, str) and "," in devices else int(devices)


def strategy_name(strategy: Any, processes: int) -> str:
    """One of `KNOWN`, or the name of an unknown strategy."""
    if isinstance(strategy, str):
        if strategy == "auto":
            return "single" if processes == 1 else "ddp"
        return {"deepspeed": "deepspeed_stage_2"}.get(strategy, "ddp" if strategy.startswith("ddp") else strategy)
    is_config = isinstance(strategy, Mapping)
    name = strategy["class_path"].rpartition(".")[2] if is_config else type(strategy).__name__
    if name == "DeepSpeedStrategy":
        given = strategy.get("init_args", {}) if is_config else strategy.config["zero_optimization"]
        return f"deepspeed_stage_{given.get('stage', 2)}"
    return _CLASSES.get(name, name)


def local_device() -> str | None:
    """Name of this machine's GPU in `DEVICES`; None if it is not there."""
    if not torch.cuda.is_available():
        return None
    words = torch.cuda.get_device_name().lower().replace("rtx ", "rtx").replace("-", " ").split()
    return next((name for name in DEVICES if name in words), None)
