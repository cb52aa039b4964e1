"""Self-checks: whether what is computed quickly is what is computed plainly.

`parity` compares shared and repeated prefixes, `decoding_check` sampling with a cache and forwards without one,
`sampler_parity` another program's sampler and the policy; `model_introspection` reads facts off a short run. The check
of layers, which `shared_prefix` runs when it is first entered, is `attention.layer_check`. All of them take their
limits from `utilities.tolerances` and run models by `utilities.modes`.
"""

from pl_grouprl.checks.parity import check_parity, compare_paths
from pl_grouprl.checks.parity_report import LayerParity, PaddedParity, ParityError, ParityReport

__all__ = ["LayerParity", "PaddedParity", "ParityError", "ParityReport", "check_parity", "compare_paths"]
