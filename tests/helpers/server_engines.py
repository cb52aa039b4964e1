"""An engine of fake servers, with a few prompts."""

from pl_grouprl.rollout import VLLMServerRolloutEngine
from pl_grouprl.types import SamplingConfig

SAMPLING = SamplingConfig(max_new_tokens=3, stop_token_ids=(4,))
PROMPTS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10], [11], [12, 13], [14]]


def weights(policy):
    return ((name, parameter.detach()) for name, parameter in policy.named_parameters())


def make_engine(policy, *servers, **options):
    engine = VLLMServerRolloutEngine([server.url for server in servers], timeout=3, **options)
    engine.bind(policy)
    engine._bucket_bytes = 8192  # several buckets
    return engine


def tokens(groups):
    return [[rollout.token_ids for rollout in group] for group in groups]
