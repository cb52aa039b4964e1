"""Self-checks that compare fast paths with plain ones.

`parity` compares shared with repeated prefixes, `decoding_check` sampling with a cache with forwards without one, and
`sampler_parity` a separate sampler with the policy; `model_introspection` reads facts off a short run. The check of
layers, which `shared_prefix` runs when first entered, is `attention.layer_check`. All of them take their tolerances
from `utilities.tolerances` and run models by `utilities.modes`.
"""

from pl_grouprl.checks.parity import check_parity, compare_paths
from pl_grouprl.checks.parity_report import LayerParity, PaddedParity, ParityError, ParityReport

__all__ = ["LayerParity", "PaddedParity", "ParityError", "ParityReport", "check_parity", "compare_paths"]
