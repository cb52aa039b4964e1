"""Two ranks whose servers get weights from rank 0: when `update_weights` returns on one, all servers have them.

Arguments: the url of a server, and "fail" if the stream of the second update fails on rank 0.
"""

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "helpers"))
from tiny_models import tiny_model

from pl_grouprl.rollout import VLLMServerRolloutEngine
from pl_grouprl.types import SamplingConfig

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
policy = tiny_model("llama", tie_word_embeddings=False)
engine = VLLMServerRolloutEngine(sys.argv[1], timeout=5)
engine.bind(policy)


def stream(version):
    """As if the weights were shards: each comes once both ranks ask for it."""
    for name, weight in policy.named_parameters():
        torch.distributed.barrier()
        yield name, weight.detach()
    if rank == 0:
        time.sleep(0.3)  # the last bucket is sent later
        if version == 2 and sys.argv[2:] == ["fail"]:
            raise KeyError("the disk of rank 0")


for version in (1, 2):
    try:
        engine.update_weights(stream(version), version=version)
        assert engine._servers[0].label() == engine._labels.of(version)
    except KeyError:
        assert rank == 0
    except RuntimeError as error:
        assert rank == 1
        assert "rank 0 failed with KeyError: 'the disk of rank 0'" in str(error)  # noqa: PT017 (on this rank alone)
    if engine.version is None:
        print("lost")
        break
    ((rollout,),) = engine.generate([[1, 2 + rank]], SamplingConfig(max_new_tokens=2), num_generations=1, seed=0)
    assert rollout.weight_versions == [version] * 2
    torch.distributed.barrier()
print("ended", engine.max_model_len)
