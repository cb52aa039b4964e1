"""FSDPStrategy and DeepSpeedStrategy on gloo ranks: Lightning refuses both on CPU, these skip that check alone."""

from __future__ import annotations

from argparse import Namespace
from typing import Any
from unittest.mock import patch

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel


class CPUFSDPStrategy(FSDPStrategy):
    """FSDP1 with flat parameters in main memory. Checkpoints must be sharded (`state_dict_type='sharded'`)."""

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        return FullyShardedDataParallel(
            model,
            sharding_strategy=self.sharding_strategy,
            cpu_offload=self.cpu_offload,
            mixed_precision=self.mixed_precision_config,
            device_id=torch.device("cpu"),
            **self.kwargs,
        )


class CPUDeepSpeedStrategy(DeepSpeedStrategy):
    """ZeRO of two gloo ranks. Needs ninja and g++ at first use."""

    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()  # without the check of the accelerator's type

    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def _setup_model_and_optimizer(self, model: Any, optimizer: Any, lr_scheduler: Any = None) -> tuple[Any, Any]:
        import deepspeed

        engine, optimizer, *_ = deepspeed.initialize(
            args=Namespace(device_rank=self.local_rank),  # a whole device's index would be that of a GPU
            model=model,
            model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            config=self.config,
            dist_init_required=False,
        )
        return engine, optimizer

    def _initialize_deepspeed_inference(self, model: torch.nn.Module) -> None:
        with patch("argparse.Namespace", lambda **_: Namespace(device_rank=self.local_rank)):
            super()._initialize_deepspeed_inference(model)


def make_strategy(name: str) -> Any:
    """A strategy of two ranks: `fsdp1`, `fsdp2`, a stage of ZeRO (`z3`, `z2_offload`), or Lightning's name."""
    if name == "fsdp1":
        return CPUFSDPStrategy(state_dict_type="sharded")
    if name == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    if name.startswith("z"):
        stage, offload = int(name.removeprefix("zero").removeprefix("z")[0]), name.endswith("offload")
        return CPUDeepSpeedStrategy(stage=stage, offload_optimizer=offload, offload_parameters=offload and stage == 3)
    return name
