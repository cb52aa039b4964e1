"""What limited a run, on made-up times."""

from dataclasses import replace

import pytest

from pl_grouprl.callbacks.bottleneck import RunFacts, find_bottleneck

GPU = RunFacts("cuda")
COLOCATED = RunFacts("cuda", "VLLMRolloutEngine")
SERVER = RunFacts("cuda", "VLLMServerRolloutEngine")
RECOMPUTES = replace(GPU, recomputes=True, unused_memory=0.55)


@pytest.mark.parametrize(
    ("parts", "outside", "facts", "sentence"),
    [
        ({"rollout": 78, "update": 20, "other": 2}, 0, GPU,
            "Rollouts took 78% of a step; vLLM (--config rollout/vllm_colocate.yaml) would shorten them."),
        ({"rollout": 60, "update": 40}, 0, COLOCATED,
            "Rollouts took 60% of a step; vLLM on other GPUs (rollout/vllm_server.yaml) with max_staleness: 1 would "
            "train meanwhile (docs/rollouts.md#rollouts-ahead)."),
        ({"rollout": 70, "update": 30}, 0, replace(SERVER, longest=5.14),
            "Rollouts took 70% of a step, mostly waiting for the longest, of 5.1 times the mean length; "
            "max_staleness: 1 would train meanwhile (docs/rollouts.md#rollouts-ahead)."),
        ({"wait_for_rollouts": 40, "update": 60}, 0, replace(SERVER, max_staleness=1, fused=True),
            "Waiting for rollouts took 40% of a step; more servers (engine urls) would shorten it."),
        ({"rollout": 50, "reward": 30, "update": 20}, 0, GPU,
            "Waiting for rewards took 30% of a step; reward_calls.workers (now 0) would compute them during scoring."),
        ({"rollout": 20, "reward": 60, "update": 20}, 0, replace(GPU, reward_workers=2),
            "Waiting for rewards took 60% of a step; more reward_calls.workers (now 2) would shorten it."),
        ({"rollout": 30, "update": 62, "other": 8}, 0, RECOMPUTES,
            "Updates took 62% of a step and recompute activations, about a quarter of their work, while 55% of the "
            "GPU's memory was never used; gradient_checkpointing: false of the policy would save that."),
        ({"rollout": 30, "update": 70}, 0, GPU,
            "Updates took 70% of a step; fused layers (pip install 'pl-grouprl[liger]') would shorten them."),
        ({"rollout": 30, "update": 70}, 0, replace(RECOMPUTES, unused_memory=0.2, fused=True),
            "Updates took 70% of a step; gradient_checkpointing: attention of the policy would shorten them."),
        ({"rollout": 40, "wait_for_ranks": 25, "update": 35}, 0, GPU,
            "Waiting for ranks with longer rollouts took 25% of a step; a larger batch_size would even them out."),
        ({"rollout": 30, "weight_sync": 30, "update": 40}, 0, COLOCATED,
            "Sending weights to the sampler took 30% of a step; a larger batch_size would send them less often."),
        ({"rollout": 30, "weight_sync": 30, "update": 40}, 0, replace(COLOCATED, sends_adapter=False),
            "Sending weights to the sampler took 30% of a step; adapter: separate of the engine would send the "
            "adapter alone."),
        ({"rollout": 45, "update": 55}, 50, replace(GPU, fused=True),
            "Validation, checkpoints and logging took 33% of the run after its start; a larger "
            "trainer.val_check_interval, or every_n_train_steps of SafeCheckpoint, would shorten them."),
    ],
)  # fmt: skip
def test_one_sentence(parts, outside, facts, sentence):
    assert find_bottleneck({**parts, "step": sum(parts.values())}, outside, facts) == sentence


@pytest.mark.parametrize(
    ("parts", "outside", "facts"),
    [
        ({}, 0, GPU),
        ({"rollout": 50, "update": 50}, 10, GPU),  # nothing stands out
        ({"rollout": 90, "update": 10}, 0, RunFacts("cpu")),  # nothing would help
        ({"rollout": 90, "update": 10}, 0, RunFacts("cuda", "MyEngine")),
        ({"rollout": 30, "update": 70}, 0, RunFacts("cpu")),
        ({"rollout": 30, "update": 70}, 0, replace(GPU, recomputes="attention", fused=True)),  # has all that helps
        ({"wait_for_rollouts": 10, "update": 90}, 0, replace(SERVER, max_staleness=1, longest=9.0, fused=True)),
    ],
)
def test_no_advice(parts, outside, facts):
    assert find_bottleneck({**parts, "step": sum(parts.values())}, outside, facts) is None
