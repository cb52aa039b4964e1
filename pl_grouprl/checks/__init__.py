"""Self-checks that compare fast paths with plain ones.

- `parity`: shared against repeated prefixes;
- `sampling`: sampling with a cache against forwards without one, and a separate sampler against the policy;
- `model_introspection`: facts about a model from a short run of it.

The check of layers, which `shared_prefix` runs when first entered, is `attention.layer_check`. All tolerances are in
`utilities.tolerances`; `utilities.modes` has the contexts in which models run.
"""

from pl_grouprl.checks.parity import LayerParity, PaddedParity, ParityError, ParityReport, check_parity, compare_paths

__all__ = ["LayerParity", "PaddedParity", "ParityError", "ParityReport", "check_parity", "compare_paths"]
