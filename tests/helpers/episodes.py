"""Rollouts that are episodes, made by hand."""

from pl_grouprl.types import LiveObject, Rollout, RolloutGroup

CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"key": "a"}}}
QUESTION = [{"role": "user", "content": "How much is a?"}]


def turns_of(result="41", answer="#### 42", thought=""):
    """The messages of an episode with one call."""
    return [
        {"role": "assistant", "content": thought, "tool_calls": [CALL]},
        {"role": "tool", "name": "look_up", "content": result},
        {"role": "assistant", "content": answer},
    ]


def make_episode(*, observation=0, environment=None, **changes):
    """Three tokens with a call, two of its result, one of the answer, after tokens of an observation."""
    fields = {
        "token_ids": [9] * observation + [1, 2, 3, 4, 5, 6],
        "logprobs": [0.0] * observation + [-1.0, -2.0, -3.0, 0.0, 0.0, -4.0],
        "loss_mask": [0] * observation + [1, 1, 1, 0, 0, 1],
        "num_observation_tokens": observation,
        "finish_reason": "stop",
        "text": "call 41 #### 42",
        "messages": turns_of(),
        "prompt": [{"role": "user", "content": "How much is a? It is dark."}] if observation else None,
        "tool_counts": {"calls": 1.0, "seconds": 0.5},
        "environment": None if environment is None else LiveObject(environment),
    }
    return Rollout(**fields | changes)


def make_group(*rollouts, answer="42", **fields):
    """A group of episodes with a reference."""
    return RolloutGroup([7, 8], list(rollouts), columns={"answer": answer}, prompt=QUESTION, **fields)
