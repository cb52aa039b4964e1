"""Groups for reward functions, and functions that return what a test says."""

from pl_grouprl.types import Rollout, RolloutGroup


def group_of(*texts, prompt="p", **columns):
    """A group whose completions have a token for each character."""
    rollouts = [Rollout([7] * len(text), text=text) for text in texts]
    return RolloutGroup([1], rollouts, columns=columns or {"answer": "a"}, prompt=prompt)


def rewards_of(*groups):
    return [rollout.reward for group in groups for rollout in group.rollouts]


def returning(*values):
    """A function of TRL's signature that returns these values."""

    def given(completions, **columns):
        return list(values)

    return given
