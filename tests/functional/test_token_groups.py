"""Token groups against a plain loop over tokens, and what must not move a boundary."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pl_grouprl.functional.token_groups import (
    ENDED_BY_LAST,
    ENDED_BY_SIZE,
    ENDED_BY_VARIANCE,
    ThresholdController,
    find_token_groups,
    improbable_token_groups,
    log_ratio_scores,
    signal_sums,
    token_group_counts,
    token_group_metrics,
)

FLOATS = [torch.bfloat16, torch.float32, torch.float64]


def loop_over_tokens(deltas, norms, mask, *, threshold=1.0, max_size=16, epsilon=1e-6, forced=None, mean_signal=None):
    """The rule, token by token, in the precision of zero-dimensional tensors (at least float32).

    Returns:
        Per row the list of (first, last, cause) of its groups.
    """
    dtype = torch.promote_types(deltas.dtype, torch.float32)
    deltas, norms = deltas.to(dtype), norms.to(dtype)
    valid = [[t for t in range(mask.shape[1]) if mask[row, t]] for row in range(len(mask))]
    if mean_signal is None:
        signals = [float(deltas[b, t]) ** 2 * float((norms[b, t] ** 2).sum() if norms.dim() == 3 else norms[b, t])
                   for b, row in enumerate(valid) for t in row]  # fmt: skip
        mean_signal = sum(signals) / max(len(signals), 1)
    found = []
    for b, row in enumerate(valid):
        groups, tokens = [], []
        for t in row:
            tokens.append(t)
            square = deltas[b, t] * deltas[b, t]
            if norms.dim() == 3:
                first = sum(deltas[b, n] * norms[b, n] for n in tokens)
                second = sum(norms[b, n] for n in tokens)
                ppo, grpo = torch.linalg.vector_norm(first) ** 2, square * torch.linalg.vector_norm(second) ** 2
            else:
                ppo = sum(deltas[b, n] * deltas[b, n] * norms[b, n] for n in tokens)
                grpo = square * sum(norms[b, n] for n in tokens)
            k = len(tokens)
            if ppo > epsilon * mean_signal and k * ppo * (1 + 1e-5) >= threshold * grpo:
                cause = ENDED_BY_VARIANCE
            elif k == max_size:
                cause = ENDED_BY_SIZE
            elif t == row[-1] or (forced is not None and forced[b, t]):
                cause = ENDED_BY_LAST
            else:
                continue
            groups.append((tokens[0], t, cause))
            tokens = []
        found.append(groups)
    return found


def as_lists(groups):
    rows = []
    for starts, ends, causes in zip(groups.starts, groups.ends, groups.causes, strict=True):
        first, last = starts.nonzero().flatten().tolist(), ends.nonzero().flatten().tolist()
        assert torch.equal(causes > 0, ends)
        rows.append(list(zip(first, last, causes[ends].tolist(), strict=True)))
    return rows


def sizes(groups, mask):
    """Valid tokens of each group, row by row."""
    index = groups.group_index
    return [torch.bincount(index[b][mask[b]]).tolist() if mask[b].any() else [] for b in range(len(mask))]


def random_case(seed, rows=6, length=23, gaps=True, dtype=torch.float32, size=None):
    generator = torch.Generator().manual_seed(seed)
    deltas = torch.randn(rows, length, generator=generator, dtype=torch.float64)
    deltas[torch.rand(rows, length, generator=generator) < 0.15] = 0
    shape = (rows, length) if size is None else (rows, length, size)
    norms = torch.rand(shape, generator=generator, dtype=torch.float64)
    if size is not None:
        norms -= 0.5
    mask = torch.arange(length) < torch.randint(0, length + 1, (rows, 1), generator=generator)
    if gaps:
        mask &= torch.rand(rows, length, generator=generator) < 0.8
    return deltas.to(dtype), norms.to(dtype), mask


def dyadic_case(seed, rows=6, length=23):
    """Small multiples of 1/8: every sum and product is exact, so ties are ties."""
    generator = torch.Generator().manual_seed(seed)
    deltas = torch.randint(-8, 9, (rows, length), generator=generator) / 8
    norms = torch.randint(0, 9, (rows, length), generator=generator) / 8
    mask = torch.rand(rows, length, generator=generator) < 0.9
    return deltas, norms, mask


OPTIONS = [
    {},
    {"threshold": 1.5, "max_size": 4},
    {"threshold": 3.0, "max_size": 7},
    {"threshold": 9.0, "max_size": 100},
    {"threshold": 2.0, "max_size": 1},
    {"threshold": 2.0, "epsilon": 0.5},
    {"threshold": 2.0, "epsilon": 0.0},
    {"threshold": 2.0, "mean_signal": 1e6},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("make", [dyadic_case, random_case])
def test_same_cut_as_a_loop_over_tokens(make, seed, options):
    deltas, norms, mask = make(seed)
    found = find_token_groups(deltas, norms, mask, **options)
    assert as_lists(found) == loop_over_tokens(deltas, norms, mask, **options)


@pytest.mark.parametrize("dtype", FLOATS)
def test_same_cut_as_a_loop_in_each_precision(dtype):
    deltas, norms, mask = random_case(11, dtype=dtype)
    found = find_token_groups(deltas, norms, mask, threshold=2.5)
    assert as_lists(found) == loop_over_tokens(deltas, norms, mask, threshold=2.5)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("options", [{}, {"threshold": 2.0, "max_size": 5}, {"threshold": 4.0, "epsilon": 0.3}])
def test_vectors_take_the_literal_formula(size, options):
    deltas, scores, mask = random_case(5, dtype=torch.float64, size=size)
    found = find_token_groups(deltas, scores, mask, **options)
    assert as_lists(found) == loop_over_tokens(deltas, scores, mask, **options)


def test_many_rows_are_cut_in_blocks(monkeypatch):
    deltas, norms, mask = random_case(3, rows=40)
    whole = find_token_groups(deltas, norms, mask, threshold=2.0)
    monkeypatch.setattr("pl_grouprl.functional.token_groups._BLOCK", 50)  # two rows at a time
    found = find_token_groups(deltas, norms, mask, threshold=2.0)
    assert all(torch.equal(left, right) for left, right in zip(found, whole, strict=True))


class _Operators(TorchDispatchMode):
    """Counts operators, and remembers the most elements of any tensor that one returned."""

    def __init__(self):
        super().__init__()
        self.count, self.numel = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.count += 1
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return result


def test_no_loop_over_tokens_and_no_large_tensor(monkeypatch):
    monkeypatch.setattr("pl_grouprl.functional.token_groups._BLOCK", 10**9)

    def operators(length):
        ones = torch.ones(4, length)
        with _Operators() as seen:
            find_token_groups(ones, ones, ones.bool(), threshold=100.0, max_size=8)
        assert seen.numel <= 4 * (length + 1)
        return seen.count

    # Six doublings of the length: six pointer-doubling steps more, of four operators each at most.
    assert operators(4096) - operators(64) <= 6 * 4


def test_by_hand():
    # q = 1. From 0: delta 2, then 3: k * r_ppo = 1 * 4 < 2 * 4; 2 * 13 = 26 < 2 * 2 * 9 = 36; then 1: 3 * 14 = 42 >=
    # 2 * 3 * 1: ends. From 3: 1; 2 * 2 < 2 * 2 * 1 is false: 4 >= 4 ends. The last token is alone: 1 * 9 < 2 * 9.
    deltas = torch.tensor([[2.0, 3.0, 1.0, 1.0, 1.0, 3.0, 99.0]])
    mask = torch.tensor([[True] * 6 + [False]])
    groups = find_token_groups(deltas, torch.ones(1, 7), mask, threshold=2.0)
    assert as_lists(groups) == [[(0, 2, ENDED_BY_VARIANCE), (3, 4, ENDED_BY_VARIANCE), (5, 5, ENDED_BY_LAST)]]
    assert groups.group_index.tolist() == [[0, 0, 0, 1, 1, 2, -1]]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("threshold", [1.0, 0.3])
@pytest.mark.parametrize("size", [None, 64])
def test_threshold_1_ends_a_group_at_every_informative_token(dtype, threshold, size):
    deltas, norms, mask = random_case(7, rows=50, length=40, gaps=False, dtype=dtype, size=size)
    deltas[deltas == 0] = 1
    norms[torch.rand(mask.shape, generator=torch.Generator().manual_seed(0)) < 0.2] = 0  # nothing to learn there
    informative = (norms.any(2) if size else norms != 0) & mask
    groups = find_token_groups(deltas, norms, mask, threshold=threshold, epsilon=0.0)
    assert groups.ends[informative].all()
    assert (groups.causes[informative] == ENDED_BY_VARIANCE).all()


def test_a_token_with_a_delta_of_zero_still_counts_for_its_group():
    """The rule to the letter: the score of such a token is part of r_grpo, and only of that."""
    mask = torch.ones(1, 2, dtype=torch.bool)
    deltas = torch.tensor([[0.0, 1.0]])
    # At the second token r_ppo = q_2 and r_grpo = q_1 + q_2: it ends the group by its variance if 2 q_2 >= q_1 + q_2.
    cheap_first = find_token_groups(deltas, torch.tensor([[0.5, 1.0]]), mask)
    dear_first = find_token_groups(deltas, torch.tensor([[1.0, 0.5]]), mask)
    assert as_lists(cheap_first) == [[(0, 1, ENDED_BY_VARIANCE)]]
    assert as_lists(dear_first) == [[(0, 1, ENDED_BY_LAST)]]


def test_tokens_without_signal_do_not_end_a_group():
    # 0 / 0 is no evidence: the group goes on, over the cheap token (q = 0) too, to the token with both.
    deltas = torch.tensor([[0.0, 0.0, 5.0, 1.0, 0.0, 0.0]])
    norms = torch.tensor([[1.0, 1.0, 0.0, 1.0, 1.0, 1.0]])
    groups = find_token_groups(deltas, norms, torch.ones(1, 6, dtype=torch.bool))
    assert sizes(groups, torch.ones(1, 6, dtype=torch.bool)) == [[4, 2]]
    assert as_lists(groups)[0][1][2] == ENDED_BY_LAST


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("threshold", "size"), [(1.0, 1), (1.2, 2), (2.0, 2), (2.5, 3), (3.0, 3), (7.9, 8)])
def test_constant_delta_gives_groups_of_ceil_threshold(dtype, threshold, size):
    mask = torch.ones(2, 24, dtype=torch.bool)
    norms = torch.full((2, 24), 0.3, dtype=dtype)
    groups = find_token_groups(torch.full((2, 24), -0.7, dtype=dtype), norms, mask, threshold=threshold)
    assert sizes(groups, mask) == [[size] * (24 // size)] * 2
    assert (groups.causes[groups.ends] == ENDED_BY_VARIANCE).all()


@pytest.mark.parametrize("seed", range(3))
def test_a_threshold_below_1_is_1(seed):
    deltas, norms, mask = random_case(seed, rows=30)
    below, one = (find_token_groups(deltas, norms, mask, threshold=threshold) for threshold in (0.2, 1.0))
    assert torch.equal(below.ends, one.ends)
    assert torch.equal(below.causes, one.causes)


def test_max_size_caps_groups():
    mask = torch.ones(1, 10, dtype=torch.bool)
    groups = find_token_groups(torch.ones(1, 10), torch.ones(1, 10), mask, threshold=100.0, max_size=4)
    assert as_lists(groups) == [[(0, 3, ENDED_BY_SIZE), (4, 7, ENDED_BY_SIZE), (8, 9, ENDED_BY_LAST)]]
    groups = find_token_groups(torch.ones(1, 10), torch.ones(1, 10), mask, threshold=100.0, max_size=10**9)
    assert as_lists(groups) == [[(0, 9, ENDED_BY_LAST)]]


def test_gaps_padding_and_neighbours_change_nothing():
    deltas, norms, _ = random_case(1, rows=3, length=12, gaps=False)
    mask = torch.ones(3, 12, dtype=torch.bool)
    options = {"threshold": 2.0, "mean_signal": 0.3}
    plain = find_token_groups(deltas, norms, mask, **options)
    # Row 0 spread over 20 places, row 1 left-padded, row 2 right-padded, an empty row; NaN wherever the mask is False.
    places = [[0, 1, 4, 5, 6, 9, 10, 11, 12, 17, 18, 19], list(range(8, 20)), list(range(12))]
    wide_deltas, wide_norms = torch.full((2, 4, 20), torch.nan).unbind(0)
    wide_mask = torch.zeros(4, 20, dtype=torch.bool)
    for source, row in ((0, 3), (1, 0), (2, 2)):
        wide_deltas[row, places[source]], wide_norms[row, places[source]] = deltas[source], norms[source]
        wide_mask[row, places[source]] = True
    wide = find_token_groups(wide_deltas, wide_norms, wide_mask, **options)
    for source, row in ((0, 3), (1, 0), (2, 2)):
        for expected, actual in zip(plain, wide, strict=True):
            assert torch.equal(actual[row, places[source]], expected[source])
    assert not wide.starts[~wide_mask].any()
    assert not wide.ends[~wide_mask].any()
    assert (wide.group_index[~wide_mask] == -1).all()
    assert as_lists(wide)[1] == []


def test_row_order_changes_nothing_with_the_mean_of_the_batch():
    deltas, norms, mask = dyadic_case(4, rows=9)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    expected = find_token_groups(deltas, norms, mask, threshold=2.0, epsilon=0.5)
    found = find_token_groups(deltas[order], norms[order], mask[order], threshold=2.0, epsilon=0.5)
    assert all(torch.equal(left, right[order]) for left, right in zip(found, expected, strict=True))


@pytest.mark.parametrize("scale", [2.0**-100, 1e-30, 1e-3, 7.0, 1e25])
def test_scaling_all_rewards_moves_no_boundary(scale):
    # Squares of 1e-30 are 0 in float32, those of 1e25 infinite.
    deltas, norms, mask = random_case(2, rows=20)
    expected = find_token_groups(deltas, norms, mask, threshold=2.3, epsilon=0.1)
    scaled = find_token_groups(deltas * scale, norms, mask, threshold=2.3, epsilon=0.1)
    assert torch.equal(scaled.ends, expected.ends)


def test_epsilon_is_relative_to_the_mean_signal():
    # Signals 100 and 1: the mean is 50.5, and 1 is below 0.1 * 50.5, above 0.01 * 50.5.
    deltas, norms, mask = torch.tensor([[10.0, 1.0]]).repeat(1, 3), torch.ones(1, 6), torch.ones(1, 6, dtype=torch.bool)
    assert sizes(find_token_groups(deltas, norms, mask, epsilon=0.01), mask) == [[1] * 6]
    assert sizes(find_token_groups(deltas, norms, mask, epsilon=0.1), mask) == [[1, 2, 2, 1]]
    # The mean over all ranks may be passed.
    total, count = signal_sums(deltas, norms, mask).tolist()
    assert (total, count) == (303.0, 6.0)
    assert sizes(find_token_groups(deltas, norms, mask, epsilon=0.01, mean_signal=200.0), mask) == [[1, 2, 2, 1]]
    assert sizes(find_token_groups(deltas, norms, mask, epsilon=0.1, mean_signal=torch.tensor(5.0)), mask) == [[1] * 6]


def test_forced_ends():
    mask = torch.ones(1, 9, dtype=torch.bool)
    mask[0, 4] = False  # a tool's output between two turns
    forced = torch.zeros(1, 9, dtype=torch.bool)
    forced[0, [3, 4]] = True  # what is forced outside the mask is no token
    groups = find_token_groups(torch.ones(1, 9), torch.ones(1, 9), mask, threshold=3.0, forced_ends=forced)
    assert as_lists(groups) == [
        [(0, 2, ENDED_BY_VARIANCE), (3, 3, ENDED_BY_LAST), (5, 7, ENDED_BY_VARIANCE), (8, 8, ENDED_BY_LAST)]
    ]
    deltas, norms, mask = random_case(8)
    forced = torch.rand(mask.shape, generator=torch.Generator().manual_seed(1)) < 0.2
    found = find_token_groups(deltas, norms, mask, threshold=4.0, forced_ends=forced)
    assert as_lists(found) == loop_over_tokens(deltas, norms, mask, threshold=4.0, forced=forced)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", ["deltas", "norms", "vectors"])
def test_nonfinite_tokens_never_end_a_group(place, value):
    deltas, norms, mask = torch.ones(2, 8), torch.ones(2, 8), torch.ones(2, 8, dtype=torch.bool)
    if place == "vectors":
        norms = torch.ones(2, 8, 2)
        norms[0, 2, 1] = value
    else:
        (deltas if place == "deltas" else norms)[0, 2] = abs(value) if place == "norms" else value
    groups = find_token_groups(deltas, norms, mask, threshold=2.0, max_size=3)
    assert sizes(groups, mask) == [[2, 3, 2, 1], [2, 2, 2, 2]]
    assert [row[1][2] for row in as_lists(groups)] == [ENDED_BY_SIZE, ENDED_BY_VARIANCE]


@pytest.mark.parametrize("dtype", FLOATS)
def test_extreme_magnitudes_are_split_like_others(dtype):
    """Two tokens to a group; the scale's power of two would be infinite for the largest, its inverse for the others."""
    kind = torch.finfo(dtype)
    deltas = torch.tensor([kind.max, kind.smallest_normal], dtype=dtype)[:, None].repeat(1, 6)
    mask = torch.ones(1, 6, dtype=torch.bool)
    for row in deltas:
        groups = find_token_groups(row[None], torch.ones(1, 6), mask, threshold=2.0)
        assert as_lists(groups) == [[(0, 1, ENDED_BY_VARIANCE), (2, 3, ENDED_BY_VARIANCE), (4, 5, ENDED_BY_VARIANCE)]]


def test_norms_slightly_below_zero_are_accepted():
    norms, mask = torch.tensor([[1.0, -1e-3, 1.0, -9.0]]), torch.tensor([[True, True, True, False]])
    assert sizes(find_token_groups(torch.ones(1, 4), norms, mask, epsilon=0.0), mask) == [[1, 2]]


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (3, 0), (2, 1)])
def test_empty_shapes_and_no_valid_token(shape):
    ones = torch.ones(shape)
    groups = find_token_groups(ones, ones, ones > 0)
    assert groups.starts.shape == groups.group_index.shape == groups.causes.shape == shape
    assert groups.ends.sum() == torch.Size(shape).numel()
    groups = find_token_groups(ones, ones, ones < 0)
    assert not groups.starts.any()
    assert (groups.group_index == -1).all()


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"td_errors": torch.ones(4)}, "td_errors"),
        ({"score_norms": torch.ones(2, 3)}, "score_norms"),
        ({"score_norms": torch.ones(4)}, "score_norms"),
        ({"score_norms": torch.full((2, 4), -0.5)}, "score_norms"),
        ({"mask": torch.ones(2, 5, dtype=torch.bool)}, "mask"),
        ({"mask": torch.full((2, 4), 0.5)}, "mask"),
        ({"forced_ends": torch.ones(2, 4)}, "forced_ends"),
        ({"forced_ends": torch.ones(2, 3, dtype=torch.bool)}, "forced_ends"),
        *(({"threshold": value}, "threshold") for value in (0.0, float("nan"))),
        *(({"max_size": value}, "max_size") for value in (0, 1.5, float("inf"), float("nan"))),
        *(({"epsilon": value}, "epsilon") for value in (-1.0, float("inf"), float("nan"))),
        *(({"mean_signal": value}, "mean_signal") for value in (float("inf"), float("nan"))),
    ],
)
def test_errors_name_the_argument(change, argument):
    arguments = dict.fromkeys(("td_errors", "score_norms", "mask"), torch.ones(2, 4))
    with pytest.raises(ValueError, match=argument):
        find_token_groups(**{**arguments, **change})


@pytest.mark.parametrize(("change", "named"), [({0: (2, 3)}, 0), ({1: (1, 4)}, 1), ({2: (1, 4)}, 0)])
def test_shapes_that_would_broadcast_are_refused(change, named):
    first, second, mask = (torch.ones(change.get(place, (2, 4))) > 0 for place in range(3))
    with pytest.raises(ValueError, match=f"^{('td_errors', 'score_norms')[named]} has shape"):
        signal_sums(first, second, mask)
    with pytest.raises(ValueError, match=f"^{('policy_logprobs', 'old_logprobs')[named]} has shape"):
        log_ratio_scores(first.float(), second.float(), mask)


def test_the_error_for_a_mask_of_another_shape_names_the_logprobs():
    with pytest.raises(ValueError, match=r"^logprobs has shape \(1, 3\) and mask \(1, 4\); pass \[B, T\]"):
        improbable_token_groups(torch.zeros(1, 3), torch.ones(1, 4))


def test_log_ratio_scores():
    mask = torch.tensor([[True, True, False]])
    old, new = torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([[-1.5, -1.0, torch.nan]])
    scores = log_ratio_scores(new, old, mask)
    assert scores.tolist() == [[[-0.5], [1.0], [0.0]]]
    # deltas 1, 1: r_ppo = |-0.5 + 1|^2 = 0.25 at the second token, r_grpo the same: k = 2 suffices for threshold 2.
    assert sizes(find_token_groups(torch.ones(1, 3), scores, mask, threshold=2.0), mask) == [[2]]
    with pytest.raises(ValueError, match="old_logprobs"):
        log_ratio_scores(old, old, mask)
    assert not log_ratio_scores(old, old, torch.zeros_like(mask)).any()  # nothing to compare is no error


def test_counts_and_metrics_by_hand():
    deltas = torch.tensor([[2.0, 3.0, 1.0, 1.0, 1.0, 3.0, 99.0], [0.0] * 7])
    mask = torch.tensor([[True] * 6 + [False], [True] * 4 + [False] * 3])
    groups = find_token_groups(deltas, torch.ones(2, 7), mask, threshold=2.0, max_size=3)
    counts = token_group_counts(groups, mask)
    # As in test_by_hand; the second row has no evidence: three tokens by size, one by the end.
    expected = {"tokens": 10, "positions": 5, "ended_by_variance": 2, "ended_by_size": 1, "ended_by_last": 2}
    assert {name: int(value) for name, value in counts.items()} == expected
    metrics = {name: value.item() for name, value in token_group_metrics(counts).items()}
    assert metrics == pytest.approx({
        "total_tokens": 10, "advantage_positions": 5, "compression_ratio": 0.5, "speedup_factor": 2.0,
        "avg_group_size": 2.0, "ended_by_variance": 0.4, "ended_by_size": 0.2, "ended_by_last": 0.4,
    })  # fmt: skip
    assert {name: int(value) for name, value in token_group_counts(groups, mask & (deltas != 3)).items()} == {
        "tokens": 8, "positions": 4, "ended_by_variance": 2, "ended_by_size": 1, "ended_by_last": 1
    }  # fmt: skip
    assert "ended_by_size" not in token_group_metrics(token_group_counts(groups._replace(causes=None)))
    with pytest.raises(ValueError, match=r"mask has shape \(2, 6\)"):
        token_group_counts(groups, mask[:, 1:])


def test_one_step_of_the_threshold_by_hand():
    controller = ThresholdController(2.0, threshold_lr=0.1, target_compression=0.75)
    controller.update(0.25)  # too little is shared: the threshold rises, by 0.1 * 0.5 in the logarithm
    assert controller.threshold == pytest.approx(2.0 * math.exp(0.05))
    controller.update(0.95)
    assert controller.threshold == pytest.approx(2.0 * math.exp(0.05 - 0.02))
    controller.update(math.nan)
    assert controller.threshold == pytest.approx(2.0 * math.exp(0.03))


@pytest.mark.parametrize(
    ("options", "threshold"),
    [
        ({}, pytest.approx(4.0)),  # 1 / (1 - 0.75)
        ({"target_compression": 0.5}, 2.0),
        ({"target_compression": 0.0}, 1.0),
        ({"target_compression": 0.9375}, 10.0),  # 16, clipped
        ({"group_variance_threshold": 3.0, "min_threshold": 3.0}, 3.0),
        ({"group_variance_threshold": 10.0}, 10.0),
        ({"group_variance_threshold": 0.05}, 1.0),  # below 1, and below min_threshold too
        # A fixed threshold ignores bounds and target.
        ({"adaptive_threshold": False, "target_compression": 0.3, "max_size": 1}, 1.0),
        ({"group_variance_threshold": 0.5, "adaptive_threshold": False}, 0.5),
        ({"group_variance_threshold": 50.0, "adaptive_threshold": False}, 50.0),
    ],
)
def test_the_threshold_starts(options, threshold):
    assert ThresholdController(**options).threshold == threshold


def test_the_threshold_is_clipped():
    up = ThresholdController(threshold_lr=5.0, max_threshold=6.0)
    down = ThresholdController(threshold_lr=5.0, min_threshold=2.5)
    lowest = ThresholdController(threshold_lr=5.0, min_threshold=0.1)
    for _ in range(5):
        up.update(0.0)
        down.update(0.9)
        lowest.update(0.9)
    assert (up.threshold, down.threshold, lowest.threshold) == (6.0, 2.5, 1.0)
    up.update(0.9)  # no wind-up: it comes down at once
    assert up.threshold < 6.0


def test_fixed_threshold_does_not_move():
    controller = ThresholdController(3.0, adaptive_threshold=False, threshold_lr=1.0)
    controller.update(0.0)
    assert controller.threshold == 3.0
    controller.load_state_dict({"threshold": 7.0})
    assert controller.threshold == 3.0


def compression_of(threshold, seed):
    generator = torch.Generator().manual_seed(seed)
    deltas = 1 + 0.5 * torch.randn(16, 64, generator=generator)
    norms = torch.rand(16, 64, generator=generator)
    groups = find_token_groups(deltas, norms, torch.ones(16, 64, dtype=torch.bool), threshold=threshold)
    return token_group_metrics(token_group_counts(groups))["compression_ratio"].item()


def test_the_threshold_converges_to_the_target():
    controller, last = ThresholdController(1.0, threshold_lr=0.1), []
    for step in range(250):
        compression = compression_of(controller.threshold, step)
        controller.update(compression)
        last = [*last[-19:], compression]
    assert abs(sum(last) / len(last) - 0.75) < 0.02


def test_the_threshold_resumes():
    whole, first, second = (ThresholdController(threshold_lr=0.3) for _ in range(3))
    for step in range(6):
        whole.update(compression_of(whole.threshold, step))
    for step in range(3):
        first.update(compression_of(first.threshold, step))
    second.load_state_dict(first.state_dict())
    for step in range(3, 6):
        second.update(compression_of(second.threshold, step))
    assert second.threshold == whole.threshold != ThresholdController().threshold


@pytest.mark.parametrize(
    "change",
    [
        {"group_variance_threshold": 2.0},
        {"adaptive_threshold": False},
        {"threshold_lr": 0.2},
        {"min_threshold": 5.0},
        {"max_threshold": 3.0},
        {"target_compression": 0.5},
    ],
)
def test_each_option_changes_the_threshold(change):
    plain, changed = ThresholdController(), ThresholdController(**change)
    plain.update(0.6)
    changed.update(0.6)
    assert plain.threshold != changed.threshold


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"target_compression": 0.3}, "target_compression"),
        ({"target_compression": 0.9, "max_size": 8}, "target_compression"),
        ({"target_compression": 1.0}, "target_compression"),
        ({"target_compression": -0.1}, "target_compression"),
        ({"target_compression": math.nan}, "target_compression"),
        ({"max_size": 1}, "target_compression"),
        ({"group_variance_threshold": 0.0}, "group_variance_threshold"),
        ({"threshold_lr": -1.0}, "threshold_lr"),
        ({"min_threshold": 0.0}, "min_threshold"),
        ({"min_threshold": 4.0, "max_threshold": 3.0}, "max_threshold"),
        ({"max_threshold": 0.5}, "max_threshold"),
        ({"max_size": 0}, "max_size"),
        ({"max_size": 2.5}, "max_size"),
        ({"max_size": math.nan}, "max_size"),
        ({"group_variance_threshold": 50.0}, "group_variance_threshold"),
        ({"group_variance_threshold": 2.0, "min_threshold": 3.0}, "group_variance_threshold"),
        ({"group_variance_threshold": 0.5, "min_threshold": 3.0}, "group_variance_threshold"),
        ({"adaptive_threshold": False, "threshold_lr": math.nan}, "threshold_lr"),
        ({"adaptive_threshold": False, "max_threshold": math.inf}, "max_threshold"),
    ],
)
def test_threshold_errors_name_the_option(options, argument):
    with pytest.raises(ValueError, match=argument):
        ThresholdController(**options)


def test_largest_target_of_each_size_is_accepted():
    for size in range(2, 200):
        ThresholdController(target_compression=1 - 1 / size, max_size=size)
        ThresholdController(target_compression=(size - 1) / size, max_size=size)
    ThresholdController(target_compression=0.0, max_size=1)


# Groups that end at improbable tokens.


def improbable_loop(probabilities, mask, probability, max_size, forced):
    """Starts and causes of one row, token by token."""
    starts, causes, size = [False] * len(mask), [0] * len(mask), 0
    valid = [t for t, inside in enumerate(mask) if inside]
    for t in valid:
        starts[t], size = size == 0, size + 1
        if probabilities[t] < probability:
            causes[t] = 1
        elif size == max_size:
            causes[t] = 2
        elif t == valid[-1] or forced[t]:
            causes[t] = 3
        size = 0 if causes[t] else size
    return starts, causes


@pytest.mark.parametrize("max_size", [None, 1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_improbable_tokens_end_groups_as_in_a_loop(max_size, seed):
    generator = torch.Generator().manual_seed(seed)
    probabilities = torch.rand(6, 17, generator=generator, dtype=torch.float64)
    mask, forced = (torch.rand(2, 6, 17, generator=generator) < torch.tensor([0.8, 0.1])[:, None, None]).unbind()
    mask[0] = False
    logprobs = probabilities.log().where(mask, torch.nan)
    groups = improbable_token_groups(logprobs, mask, probability=0.3, max_size=max_size, forced_ends=forced)
    for row in range(6):
        arguments = probabilities[row].tolist(), mask[row].tolist(), 0.3, max_size, forced[row].tolist()
        starts, causes = improbable_loop(*arguments)
        assert groups.starts[row].tolist() == starts
        assert groups.causes[row].tolist() == causes
    assert torch.equal(groups.ends, groups.causes > 0)
    assert torch.equal(groups.group_index, (groups.starts.cumsum(1) - 1).where(mask, -1))


def test_improbable_tokens_in_bfloat16_and_without_rows():
    """0.1 and 0.9 in bfloat16; a probability of exactly 0.5 is not less than 0.5."""
    logprobs = torch.tensor([[0.9, 0.1, 0.5, 0.9]]).log().bfloat16()
    groups = improbable_token_groups(logprobs, torch.ones(1, 4), probability=0.5)
    assert groups.ends.tolist() == [[False, True, False, True]]
    assert improbable_token_groups(torch.zeros(0, 0), torch.zeros(0, 0, dtype=torch.bool)).starts.shape == (0, 0)
    for options, name in (({"probability": 0.0}, "probability"), ({"max_size": 0}, "max_size")):
        with pytest.raises(ValueError, match=name):
            improbable_token_groups(logprobs, torch.ones(1, 4), **options)
    with pytest.raises(ValueError, match="forced_ends"):
        improbable_token_groups(logprobs, torch.ones(1, 4), forced_ends=torch.ones(1, 4))
