"""Advantages per segment of branched rollouts, without a critic.

A group is a tree: from the prompt and from each branch point, several continuations are sampled independently. A
*segment* runs from the prompt or a branch point to the next branch point or the end of the rollout. Rollouts are the
leaves, one row each, so a segment is trained once for every leaf beneath it.

**The gradient.** Write V(s) for the expected reward after the state s. If w continuations c of s are sampled, with ends
s_c, then

    grad V(s) = E[ mean_c ( grad log pi(c) (V(s_c) - b_c) + grad V(s_c) ) ]

for any baseline b_c that does not depend on the tokens of c. Unrolled from the prompt down, each segment v has the
weight q_v, the product of 1 / (number of siblings, itself included) over v and the segments before it:

    grad J = E[ sum_v q_v grad log pi(v) A_v ],  A_v = an unbiased estimate of V(end of v), minus b_v.

**Leaves.** q_v is the sum of q_l over the leaves l beneath v. So a loss that sums each row's tokens and divides by the
number of rows (n in P groups), as `seq-mean-token-sum` and `seq-mean-token-sum-norm` do, gives this estimate, averaged
over the prompts, if row l has the advantages

    w_l A_v,  w_l = q_l n / P: the *leaf weight*,

which is 1 for trees of one width and depth, without early ends. Whether, where and how widely a branch splits may
depend on all tokens sampled before, but not on later ones. Other aggregations (`token-mean`, `seq-mean-token-mean`)
keep the length bias that they have without branches.

If nothing branches, all weights are 1 and both estimators equal `rloo`.

Legend: B rollouts, P prompts (groups), M nodes of the trees, T length of the longest row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pl_grouprl.functional.advantages.base import (
    BranchPaths,
    Forest,
    Groups,
    build_forest,
    gather_groups,
    register_advantage_estimator,
)
from pl_grouprl.functional.masked import Reduce, bool_mask, differ
from pl_grouprl.utilities.options import check_options


@register_advantage_estimator("tree", per_token=True)
@torch.no_grad()
def tree_advantages(
    rewards: Tensor,
    group_ids: Tensor | Sequence[int],
    mask: Tensor,
    branches: BranchPaths,
    *,
    leave_one_out: bool = True,
    scale: str = "none",
    eps: float = 1e-6,
    reduce: Reduce | None = None,
) -> Tensor:
    """Compare the value of each segment with those of its siblings.

        V(leaf) = its reward,  V(v) = mean over the children of v of their V
        A_v = V(v) - mean of V over the siblings of v

    V(v) is unbiased for the expected reward at the end of v, and the siblings do not depend on its tokens, so with the
    leaf weights (see the module) the gradient is unbiased. A mean over all *leaves* beneath v, as in TreeRL
    (arXiv:2506.11902), is biased if branches end early, toward the outcomes that branch further. TreeRL adds
    V(v) - V(prompt) to V(v) - V(parent), and divides by the square root of the number of leaves in place of leaf
    weights; TreeRPO (arXiv:2506.05183) has the same recursive means, normalized among siblings.

    A segment without siblings gets the advantage of the segment before it, as if the two were one, or 0 if there is
    none. Rollouts without a reward are ignored.

    Args:
        rewards: Scalar reward of each rollout, shape [B], any unit; NaN marks a rollout without a reward.
        group_ids: Prompt of each rollout, shape [B], any integers, in any order; a group must not be split over ranks.
        mask: True for trained tokens, shape [B, T].
        branches: How the rollouts branch.
        leave_one_out: If False, the baseline includes v, which multiplies the gradient of a segment with w - 1 siblings
            by (w - 1) / w.
        scale: `group` also divides by the unbiased standard deviation of the group's rewards. As in `grpo`, that is
            biased: it weights prompts by the inverse of a sampled number.
        eps: Added to the standard deviation, in units of the reward.
        reduce: Sums over ranks; defaults to this rank alone.

    Returns:
        Shape [B, T], in units of the reward, leaf weights included; 0 outside the mask. Exactly 0 for segments with
        siblings if all rewards beneath them are equal.

    Raises:
        ValueError: If shapes differ, a reward is infinite, an option is out of range, or the branches of a group
            contradict each other.
    """
    groups = gather_groups(rewards, group_ids)
    forest, trained_B = build_forest(groups.index_B, branches), bool_mask(mask).any(dim=1)
    values = _Values(forest, groups)
    baseline_M = values.siblings_mean_M if leave_one_out else values.mean_M[forest.parent_M]
    advantages_M = values.compare(values.mean_M, baseline_M)
    share_B = _shares(forest, trained_B)[forest.leaf_B]
    weights_B = _row_weights(share_B, groups.index_B, forest, trained_B, reduce)
    return _rows(advantages_M, weights_B, groups, forest, mask, scale, eps)


@register_advantage_estimator("vine", per_token=True, skips_rollouts=True)
@torch.no_grad()
def vine_advantages(
    rewards: Tensor,
    group_ids: Tensor | Sequence[int],
    mask: Tensor,
    branches: BranchPaths,
    *,
    scale: str = "none",
    eps: float = 1e-6,
    reduce: Reduce | None = None,
) -> Tensor:
    """Train one rollout per continuation of the prompt; the other branches only estimate values (VinePPO).

        A_v = V(end of v) - V(start of v)   (arXiv:2410.01679, section 4)

    for the segments v of the *trunks*: from each continuation of the prompt, the rollout that takes the first trained
    continuation at every branch point. V of a branch point is the mean over its continuations off the trunk, V of the
    prompt the mean over its other continuations, and V of the trunk's end its reward. A continuation that branches
    again counts with its own mean.

    As in the paper, continuations off the trunk are not trained: their advantages are 0, and the weights of the trunks
    make up for their rows in the denominator. V(end) and V(start) are independent of each other, and V(start) of the
    tokens of v, so the gradient is unbiased. `tree` is the mean of `vine` over all choices of trunks in the sampled
    tree: it has the same expectation and never a larger variance, and trains all sampled tokens.

    Args:
        rewards: Scalar reward of each rollout, shape [B], any unit; NaN marks a rollout without a reward.
        group_ids: Prompt of each rollout, shape [B], any integers, in any order; a group must not be split over ranks.
        mask: True for trained tokens, shape [B, T].
        branches: How the rollouts branch. The order of continuations must not depend on their content.
        scale: As in `tree_advantages`.
        eps: Added to the standard deviation, in units of the reward.
        reduce: Sums over ranks; defaults to this rank alone.

    Returns:
        Shape [B, T], in units of the reward, weights included; 0 outside the mask and off the trunks.

    Raises:
        ValueError: If shapes differ, a reward is infinite, an option is out of range, or the branches of a group
            contradict each other.
    """
    groups = gather_groups(rewards, group_ids)
    forest, trained_B = build_forest(groups.index_B, branches), bool_mask(mask).any(dim=1)
    values, shares_M = _Values(forest, groups), _shares(forest, trained_B)

    # A node is first if its number is the lowest among the trained children of its parent.
    none = torch.iinfo(torch.long).max
    number_M = forest.number_M.masked_fill(shares_M == 0, none)
    lowest_M = torch.full_like(number_M, none)
    for level in forest.levels:
        lowest_M = lowest_M.scatter_reduce(0, forest.parent_M[level], number_M[level], "amin")
    first_M = (shares_M > 0) & (number_M == lowest_M[forest.parent_M])

    # The value at the end of a node of a trunk, without its continuation in the trunk; the reward of a leaf.
    end_M = values.mean_M.clone()
    for level in reversed(forest.levels[1:]):
        child = torch.arange(level.start, level.stop, device=end_M.device)[first_M[level]]
        value = torch.where(values.is_only_M[child], end_M[child], values.siblings_mean_M[child])
        end_M[forest.parent_M[child]] = value
    advantages_M = values.compare(end_M, values.siblings_mean_M)

    trunk_M = torch.ones_like(shares_M)
    for level in forest.levels[1:]:
        trunk_M[level] = trunk_M[forest.parent_M[level]] * first_M[level]
    first_B = torch.tensor([row[0] for row in forest.segments], dtype=torch.long, device=trunk_M.device)
    share_B = trunk_M[forest.leaf_B] * shares_M[first_B]
    weights_B = _row_weights(share_B, groups.index_B, forest, trained_B, reduce)
    return _rows(advantages_M, weights_B, groups, forest, mask, scale, eps)


@torch.no_grad()
def leaf_weights(
    group_ids: Tensor | Sequence[int], mask: Tensor, branches: BranchPaths, *, reduce: Reduce | None = None
) -> Tensor:
    """Weight rollouts so that each segment counts as if it were trained once (see the module); `tree` does so itself.

    Args:
        group_ids: Prompt of each rollout, shape [B], any integers, in any order; a group must not be split over ranks.
        mask: True for trained tokens, shape [B, T]. A rollout without any gets 0 and counts as absent.
        branches: How the rollouts branch.
        reduce: Sums over ranks; defaults to this rank alone.

    Returns:
        Shape [B], float64. The mean over trained rollouts of all ranks is 1; all are 1 if no rollout branches.

    Raises:
        ValueError: If shapes differ, or the branches of a group contradict each other.
    """
    trained_B = bool_mask(mask).any(dim=1)
    groups = gather_groups(trained_B.to(torch.float64), group_ids)
    forest = build_forest(groups.index_B, branches)
    share_B = _shares(forest, trained_B)[forest.leaf_B]
    return _row_weights(share_B, groups.index_B, forest, trained_B, reduce)


class _Values:
    """Values of the nodes of all trees, float64.

    Attributes:
        mean_M: Reward of a leaf, mean over the children of an inner node.
        siblings_mean_M: Mean over the siblings of a node.
        is_only_M: Whether a node has no siblings.
    """

    def __init__(self, forest: Forest, groups: Groups) -> None:
        self._forest = forest
        mean_M, valid_M = forest.at_leaves(groups.rewards_B), forest.at_leaves(groups.valid_B.to(torch.float64))
        low_M, high_M = mean_M.masked_fill(valid_M == 0, torch.inf), mean_M.masked_fill(valid_M == 0, -torch.inf)
        total_M = count_M = torch.zeros_like(mean_M)
        for level in reversed(forest.levels):
            up = forest.parent_M[level]
            total_M = total_M.index_add(0, up, mean_M[level] * valid_M[level])
            count_M = count_M.index_add(0, up, valid_M[level])
            mean_M = torch.where(count_M > 0, total_M / count_M.clamp(min=1), mean_M)
            valid_M = valid_M.maximum((count_M > 0).to(valid_M.dtype))
            low_M = low_M.scatter_reduce(0, up, low_M[level], "amin")
            high_M = high_M.scatter_reduce(0, up, high_M[level], "amax")
        up = forest.parent_M
        self.mean_M = mean_M
        self.siblings_mean_M = (total_M[up] - mean_M) / (count_M[up] - 1).clamp(min=1)
        self._is_valid_M = valid_M > 0
        self.is_only_M = count_M[up] == 1
        self._is_equal_M = ~differ(low_M, high_M)[up]

    def compare(self, value_M: Tensor, baseline_M: Tensor) -> Tensor:
        """Subtract a baseline from values; a node without siblings inherits its parent's advantage."""
        centered_M = (value_M - baseline_M).masked_fill(~self._is_valid_M | self._is_equal_M, 0)
        advantages_M = torch.zeros_like(centered_M)
        for level in self._forest.levels:
            inherited = advantages_M[self._forest.parent_M[level]]
            advantages_M[level] = torch.where(self.is_only_M[level], inherited, centered_M[level])
        return advantages_M.masked_fill(~self._is_valid_M, 0)


def _shares(forest: Forest, trained_B: Tensor) -> Tensor:
    """Product of 1 / (number of trained siblings, itself included) along the path to each node; 0 if untrained."""
    trained_M = forest.at_leaves(trained_B.to(torch.float64))
    count_M = torch.zeros_like(trained_M)
    for level in reversed(forest.levels):
        count_M = count_M.index_add(0, forest.parent_M[level], trained_M[level])
        trained_M = trained_M.maximum((count_M > 0).to(trained_M.dtype))
    shares_M = trained_M.clone()
    for level in forest.levels:
        up = forest.parent_M[level]
        shares_M[level] = trained_M[level] * shares_M[up] / count_M[up].clamp(min=1)
    return shares_M


def _row_weights(share_B: Tensor, index_B: Tensor, forest: Forest, trained_B: Tensor, reduce: Reduce | None) -> Tensor:
    """Scale shares of a prompt's gradient to a mean of 1 over trained rollouts; all 1 if no rollout branches."""
    counts = trained_B.sum(), index_B[trained_B].unique().numel(), any(map(len, forest.points))
    counted = torch.tensor([float(count) for count in counts], dtype=torch.float64, device=share_B.device)
    num_rollouts, num_groups, has_branches = (counted if reduce is None else reduce(counted)).tolist()
    return share_B * num_rollouts / max(num_groups, 1.0) if has_branches else torch.ones_like(share_B)


def _rows(
    advantages_M: Tensor, weights_B: Tensor, groups: Groups, forest: Forest, mask: Tensor, scale: str, eps: float
) -> Tensor:
    """Put scaled and weighted advantages at the tokens of their segments."""
    check_options(
        {"scale": (scale, scale in ("none", "group"), "none or group"), "eps": (eps, eps >= 0, "0 or larger")}
    )
    if scale == "group":
        weights_B = weights_B / (groups.std()[groups.index_B] + eps)
    advantages_BT = forest.per_token(advantages_M, mask.shape[1]) * weights_B[:, None]
    return advantages_BT.masked_fill(~bool_mask(mask), 0).to(groups.dtype)
