"""GROUP PPO's token groups: boundaries, advantages, threshold and statistics."""

from pl_grouprl.functional.token_groups.advantages import ADVANTAGE_MODES, AdvantageMode, token_group_advantages
from pl_grouprl.functional.token_groups.counts import token_group_counts, token_group_metrics
from pl_grouprl.functional.token_groups.find import (
    ENDED_BY_LAST,
    ENDED_BY_SIZE,
    ENDED_BY_VARIANCE,
    TokenGroups,
    find_token_groups,
    log_ratio_scores,
    signal_sums,
)
from pl_grouprl.functional.token_groups.threshold import ThresholdController

__all__ = [
    "ADVANTAGE_MODES",
    "ENDED_BY_LAST",
    "ENDED_BY_SIZE",
    "ENDED_BY_VARIANCE",
    "AdvantageMode",
    "ThresholdController",
    "TokenGroups",
    "find_token_groups",
    "log_ratio_scores",
    "signal_sums",
    "token_group_advantages",
    "token_group_counts",
    "token_group_metrics",
]
