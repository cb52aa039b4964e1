"""Run by the tests beside it: a fit under any strategy on two gloo ranks; rank 0 writes what came of it."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from cpu_strategies import make_strategy
from tiny_runs import RoutedEngine, ScriptedEngine, TinyPolicy, share_of_letters

import pl_grouprl
from pl_grouprl.algorithms import OptimizerConfig
from pl_grouprl.callbacks import ExportPolicy, SafeCheckpoint
from pl_grouprl.data import PromptDataModule
from pl_grouprl.demo import MostFrequentDigit
from pl_grouprl.models import SharedTrunkCritic
from pl_grouprl.models.adapters import LoRAAdapter
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.types import SamplingConfig

ALGORITHMS = {name: getattr(pl_grouprl, name) for name in ("GRPO", "PPO", "GroupPPO", "Distillation")}


class Policy:
    """A tiny policy whose head may be its embedding, and which may have an adapter."""

    def __init__(self, tied: bool, adapter: LoRAAdapter | None, vocabulary: int | None = None, **options: Any) -> None:
        self.tied, self.adapter, self.vocabulary = tied, adapter, vocabulary
        self.source = TinyPolicy(**options)
        self.load_tokenizer = self.source.load_tokenizer

    def load(self) -> Any:
        model = self.source.load()
        if self.vocabulary is not None:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                model.resize_token_embeddings(self.vocabulary, mean_resizing=False)
        if self.tied:
            model.config.tie_word_embeddings = True
            model.tie_weights()
        return model if self.adapter is None else self.adapter.add_to(model)


class Poison(Callback):
    """Makes the gradient of one step infinite, on rank 1 alone."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_after_backward(self, trainer, module):
        if trainer.global_step == self.step and trainer.global_rank == 1:
            own = [g for g in module.support.gradients(list(module.policy.parameters())) if g.numel()]
            own[0].fill_(float("inf"))


class Results(Callback):
    """Keeps the metrics of every step, and the policy's whole weights at the end of a fit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_fit_end(self, trainer, module):
        state = module.support.full_state_dict(module.policy)
        if trainer.is_global_zero:
            torch.save({name: value.clone() for name, value in state.items()}, self.folder / "weights.pt")
            (self.folder / "metrics.json").write_text(json.dumps(self.steps))


def main(name: str, folder: Path, case: dict[str, Any]) -> None:
    """Fit, and validate amid it; runs of other kinds may come `before`."""
    case = {"algorithm": "GRPO", "max_steps": 2, "module": {}, "trainer": {}, "optimizer": {}, **case}
    task = MostFrequentDigit(prompt_length=20, majority_share=0.4, train_size=8, val_size=3)
    data = PromptDataModule(task, task, task, batch_size=4, val_batch_size=2, shuffle=False)
    adapter = LoRAAdapter(**case["adapter"]) if "adapter" in case else None
    policy = Policy(case.get("tied", False), adapter, **case.get("policy", {}))
    if case.get("critic") == "shared":
        case["module"]["critic"] = SharedTrunkCritic()
    if case["algorithm"] == "Distillation":
        case["module"]["teacher"] = TinyPolicy(seed=7, hidden_size=48, initializer_range=0.2)
    if "rollout_dtype" in case:
        case["module"]["engine"] = HFRolloutEngine(dtype=case["rollout_dtype"])
    if "router_replay" in case:
        case["module"]["engine"] = RoutedEngine(4) if case["router_replay"] else ScriptedEngine()
    module = ALGORITHMS[case["algorithm"]](
        policy,
        share_of_letters,
        num_generations=3,
        sampling=SamplingConfig(max_new_tokens=5),
        optimizer=OptimizerConfig(**{"learning_rate": 1e-2, **case["optimizer"]}),
        **case["module"],
    )
    callbacks = [
        SafeCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1),
        Results(folder),
        ExportPolicy(
            folder=str(folder / "export"), adapter=case.get("export", "separate" if "adapter" in case else "merged")
        ),
    ]
    if case["algorithm"] == "PPO":
        callbacks.append(ExportPolicy(attribute="critic", folder=str(folder / "critic")))
    if "poison" in case:
        callbacks.append(Poison(case["poison"]))
    trainer = Trainer(
        accelerator="cpu",
        devices=1 if name == "auto" else 2,
        strategy=make_strategy(name),
        max_steps=case["max_steps"],
        val_check_interval=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        default_root_dir=folder,
        **case["trainer"],
    )
    for kind in case.get("before", ()):
        getattr(trainer, kind)(module, data)
    trainer.fit(module, data, ckpt_path=case.get("checkpoint"), weights_only=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
