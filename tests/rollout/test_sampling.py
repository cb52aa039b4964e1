import math

import pytest
import torch

from pl_grouprl.rollout.hf.sampling import filter_logits, penalize, sample_tokens, uniforms
from pl_grouprl.types import SamplingConfig


def warped(logits_BV, sampling):
    """The distribution as transformers' own processors make it, in the order in which `generate` applies them."""
    from transformers.generation import logits_process as lp

    scores = logits_BV.float()
    if sampling.temperature != 1.0:
        scores = lp.TemperatureLogitsWarper(sampling.temperature)(None, scores)
    if sampling.top_k:
        scores = lp.TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = lp.TopPLogitsWarper(sampling.top_p)(None, scores)
    if sampling.min_p:
        scores = lp.MinPLogitsWarper(sampling.min_p)(None, scores)
    return scores.softmax(dim=-1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.3},
        {"top_k": 5},
        {"top_k": 1},
        {"top_k": 1000},
        {"top_p": 0.8},
        {"top_p": 0.01},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"temperature": 1.7, "top_k": 20, "top_p": 0.6, "min_p": 0.05},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_filters_agree_with_transformers(options, dtype):
    logits = 3 * torch.randn(16, 50, generator=torch.Generator().manual_seed(0)).to(dtype)
    sampling = SamplingConfig(**options)
    result = filter_logits(logits, sampling)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.softmax(dim=-1), warped(logits, sampling))


def test_filters_worked_by_hand():
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    kept = lambda **options: filter_logits(logits, SamplingConfig(**options)).isfinite().tolist()[0]  # noqa: E731
    assert kept(top_p=0.5) == [True, False, False, False]
    assert kept(top_p=0.51) == [True, True, False, False]
    assert kept(top_p=0.76) == [True, True, True, True]  # the last two tie
    assert kept(top_k=3) == [True, True, True, True]
    assert kept(min_p=0.3) == [True, True, False, False]
    assert kept(top_k=2, top_p=0.6) == [True, False, False, False]  # 2/3 and 1/3 are left after top-k


def test_the_penalty_is_that_of_transformers():
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 50, generator=generator)
    ids = torch.randint(50, (6, 30), generator=generator)
    seen = torch.zeros(6, 50, dtype=torch.bool).scatter_(1, ids, True)
    for penalty in (1.3, 0.7):
        exact = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.double())
        torch.testing.assert_close(penalize(logits, seen, penalty), exact.float())
        assert not torch.equal(exact, logits.double())


def test_a_penalty_worked_by_hand():
    logits = torch.tensor([[math.log(4.0), 0.0, -math.log(2.0), math.log(4.0)]])
    seen = torch.tensor([[True, True, True, False]])
    assert penalize(logits, seen, 2.0).exp().tolist() == [pytest.approx([2, 1, 0.25, 4])]
    sampling = SamplingConfig(repetition_penalty=2.0)
    token, logprob = sample_tokens(logits, sampling, torch.tensor([0.5], dtype=torch.float64), seen)
    assert token.item() == 3  # 2 + 1 + 0.25 of 7.25 are before it
    assert logprob.exp().item() == pytest.approx(4 / 7.25)
    (greedy,) = sample_tokens(logits, SamplingConfig(temperature=0, repetition_penalty=2.0), None, seen)[0]
    assert greedy == 3
    with pytest.raises(ValueError, match=r"SamplingConfig.repetition_penalty is 0; it must be above 0"):
        SamplingConfig(repetition_penalty=0)


def test_draw_inverts_the_cumulative_distribution():
    logits = torch.tensor([0.5, 0.25, 0.0, 0.25]).log().expand(6, -1)
    u = torch.tensor([0.0, 0.4999, 0.5, 0.7499, 0.75, 1 - 2.0**-53], dtype=torch.float64)
    tokens, logprobs = sample_tokens(logits, SamplingConfig(), u)
    assert tokens.tolist() == [0, 0, 1, 1, 3, 3]
    expected = [math.log(p) for p in (0.5, 0.5, 0.25, 0.25, 0.25, 0.25)]
    torch.testing.assert_close(logprobs, torch.tensor(expected))


def test_draw_never_takes_a_filtered_token():
    logits = torch.randn(2000, 30, generator=torch.Generator().manual_seed(1))
    u = torch.rand(2000, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    u[:2] = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    tokens, logprobs = sample_tokens(logits, SamplingConfig(top_k=3), u)
    ranks = (logits > logits.gather(1, tokens[:, None])).sum(dim=1)
    assert ranks.max() == 2
    expected = logits.log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0]  # of the whole distribution
    torch.testing.assert_close(logprobs, expected)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_p": 0.9}])
def test_frequencies_follow_the_distribution(options):
    count, sampling = 20_000, SamplingConfig(**options)
    logits = torch.tensor([1.0, 0.0, -1.0, 0.5, -0.5, 2.0, -3.0, 0.2])
    u = uniforms(3, [(0, g) for g in range(count)], 0, 1)[:, 0]
    tokens, _ = sample_tokens(logits.expand(count, -1), sampling, u)
    expected = count * warped(logits[None], sampling)[0]
    seen = torch.bincount(tokens, minlength=8).float()
    possible = expected > 0
    assert seen[~possible].sum() == 0
    chi_square = ((seen - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < 24.3  # 0.999 quantile at 7 degrees of freedom; fewer degrees have a lower one


def test_rare_tokens_keep_their_probability():
    # 2^-20 beside 1 - 2^-20: the boundary lies where a sum in float32 would already be coarse
    logits = torch.tensor([[1 - 2.0**-20, 2.0**-20]], dtype=torch.float32).log().expand(2, -1)
    u = torch.tensor([1 - 2.0**-20 - 2.0**-23, 1 - 2.0**-20 + 2.0**-23], dtype=torch.float64)
    tokens, _ = sample_tokens(logits, SamplingConfig(), u)
    assert tokens.tolist() == [0, 1]


def test_greedy_ignores_filters_and_needs_no_random_numbers():
    logits = torch.tensor([[0.0, 1.0, 0.5], [2.0, 1.0, 0.0]])
    tokens, logprobs = sample_tokens(logits, SamplingConfig(temperature=0.0, top_k=1), None)
    assert tokens.tolist() == [1, 0]
    torch.testing.assert_close(logprobs, logits.log_softmax(dim=-1).amax(dim=-1))


def test_nan_logits_show_in_the_logprobs():
    logits = torch.tensor([[0.0, math.nan, 0.0], [0.0, 0.0, 0.0]])
    for temperature in (0.0, 1.0):
        sampling = SamplingConfig(temperature=temperature)
        tokens, logprobs = sample_tokens(logits, sampling, torch.tensor([0.5, 0.5], dtype=torch.float64))
        assert (tokens >= 0).all()
        assert (tokens < 3).all()
        assert logprobs.isnan().tolist() == [True, False]


def test_streams_are_reproducible_distinct_and_cut_anywhere():
    sequences = [(0, 0), (0, 1), (1, 0), (1, 1)]
    whole = uniforms(11, sequences, 0, 32)
    assert torch.equal(whole, uniforms(11, sequences, 0, 32))
    assert torch.equal(whole[:, 8:20], uniforms(11, sequences, 8, 12))
    assert torch.equal(whole[[2]], uniforms(11, [(1, 0)], 0, 32))
    other = uniforms(12, sequences, 0, 32)
    assert len(torch.cat([whole, other]).unique()) == 2 * whole.numel()
    assert whole.dtype == torch.float64
    assert ((whole >= 0) & (whole < 1)).all()
    assert torch.equal(uniforms(-1, sequences, 0, 4), uniforms(2**64 - 1, sequences, 0, 4))
    with pytest.raises(ValueError, match="start is 3; it must be a multiple of 4"):
        uniforms(0, sequences, 3, 4)


@pytest.mark.parametrize("vocab_size", [511, 512, 513, 1024, 5000])
def test_a_large_vocabulary_is_searched_in_blocks(vocab_size):
    """Probabilities in powers of two, so that cumulative sums of any kind are exact."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(0, 4, (200, vocab_size), generator=generator).double()
    weights[:, -1] += 2**13 - weights.sum(dim=-1)  # the last token makes up for what is missing
    uniforms_B = torch.rand(200, generator=generator, dtype=torch.float64)
    uniforms_B[:3] = torch.tensor([0.0, 0.5, 1 - 2.0**-53])
    tokens, logprobs = sample_tokens((weights / 2**13).log(), SamplingConfig(), uniforms_B)
    ends = weights.cumsum(dim=-1) / 2**13
    starts = ends - weights / 2**13
    picked = lambda rows: rows.gather(-1, tokens[:, None])[:, 0]  # noqa: E731
    near = 2.0**-20  # of the logarithm in float32
    assert (picked(starts) <= uniforms_B + near).all()
    assert (uniforms_B < picked(ends) + near).all()
    assert (picked(weights) > 0).all()
    assert len(set((tokens // 512).tolist())) == -(-vocab_size // 512)
    torch.testing.assert_close(logprobs, (picked(weights) / 2**13).log().float())
