"""An engine of fake servers, with a few prompts."""

import itertools

from helpers.watched_processes import until

from pl_grouprl.rollout import VLLMServerRolloutEngine
from pl_grouprl.types import SamplingConfig

SAMPLING = SamplingConfig(max_new_tokens=3, stop_token_ids=(4,))
PROMPTS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10], [11], [12, 13], [14]]
GENERATE = "/inference/v1/generate"


def weights(policy):
    return ((name, parameter.detach()) for name, parameter in policy.named_parameters())


def make_engine(policy, *servers, timeout=3, **options):
    engine = VLLMServerRolloutEngine([server.url for server in servers], timeout=timeout, **options)
    engine.bind(policy)
    engine._bucket_bytes = 8192  # several buckets
    return engine


def started(policy, *servers, version=1, **options):
    """An engine whose servers have the weights."""
    engine = make_engine(policy, *servers, **options)
    engine.update_weights(weights(policy), version=version)
    return engine


def sample(engine, prompts=PROMPTS, sampling=SAMPLING, *, num_generations=1, seed=0, **options):
    return engine.generate(prompts, sampling, num_generations=num_generations, seed=seed, **options)


def at(path, act):
    """A fake server's `before`: acts on requests of a path."""
    return lambda asked: act() if asked == path else None


def after(server, answered, act):
    """A fake server's `before`: acts on one request for rollouts, when so many more have been answered in turn."""
    first, turns = len(server.asked), itertools.count()

    def look():
        turn = next(turns)
        if turn <= answered:
            until(lambda: len(server.asked) >= first + turn)
        return act() if turn == answered else None

    return at(GENERATE, look)


def tokens(groups):
    return [[rollout.token_ids for rollout in group] for group in groups]
