"""Branching rollouts of real models: each leaf has the scores of one sequence; common tokens are sampled once."""

import copy
from collections import Counter

import pytest
from helpers.continued import counted_tokens
from helpers.rollouts import PROMPTS, WithoutCaches, check_tree, plain_leaves, worst_logprob_error

from pl_grouprl.rollout import Branching, HFRolloutEngine
from pl_grouprl.rollout.branching import BranchLoop, first_own_token
from pl_grouprl.training.metrics import branch_metrics, count_sampled
from pl_grouprl.training.run import PlainRun
from pl_grouprl.training.sampler import EngineRounds, Sampler
from pl_grouprl.types import Prompt, Rollout, SamplingConfig

SAMPLING = SamplingConfig(max_new_tokens=12, stop_token_ids=(4, 9))
ENDLESS = SamplingConfig(max_new_tokens=12)
BY_TOKENS = {"points": "every_n", "width": 3, "depth": 2, "every_n": 4}
BY_ENTROPY = {"points": "entropy", "width": 3, "depth": 2}
OPTIONS = {"every_n": BY_TOKENS, "entropy": BY_ENTROPY}


def check_trees(groups):
    """Every branch point has all continuations."""
    for group in groups:
        found = check_tree(group)
        children = Counter(path[:-1] for path in found)
        assert all(found.keys() >= {(*parent, n) for n in range(count)} for parent, count in children.items())


class Plain(HFRolloutEngine):
    """Takes neither limits nor indices, and reports no log-probabilities if told so."""

    keeps_caches = takes_limits = takes_prompt_indices = False
    reports = True

    def generate(self, prompts, sampling, *, num_generations, seed):
        groups = super().generate(prompts, sampling, num_generations=num_generations, seed=seed)
        for rollout in (rollout for group in groups for rollout in group if not self.reports):
            rollout.logprobs = None
        return groups


def sample(model, options, sampling=SAMPLING, *, engine=None, prompts=PROMPTS, num_generations=2, tokenizer=None):
    """The trees of some prompts."""
    sampler = Sampler(PlainRun(model, tokenizer), engine or HFRolloutEngine())
    branching = None if options is None else Branching(**options)
    opened = [Prompt(prompt) for prompt in prompts]
    return sampler.generate(opened, sampling, num_generations, seed=("test",), branching=branching)


@pytest.mark.parametrize(
    ("family", "points"),
    [("qwen3", "every_n"), ("qwen3", "entropy"), ("gpt2", "every_n"), ("qwen2_window", "entropy")],
)
def test_leaves_have_the_logprobs_of_their_sequence(make_model, family, points):
    model = make_model(family)
    groups = sample(model, OPTIONS[points])
    check_trees(groups)
    assert worst_logprob_error(model, groups) < 1e-5
    leaves = [rollout for group in groups for rollout in group.rollouts]
    assert {rollout.finish_reason for rollout in leaves} == {"stop", "length"}
    assert {len(rollout.branch_points) for rollout in leaves} >= {1, 2}
    again = WithoutCaches() if family != "qwen3" else HFRolloutEngine(max_sequences=3)
    assert plain_leaves(groups) == plain_leaves(sample(model, OPTIONS[points], engine=again))


def test_every_n_branches_where_it_says(qwen3):
    (group,) = sample(qwen3, BY_TOKENS, ENDLESS, prompts=PROMPTS[:1])
    assert {rollout.branch_points for rollout in group.rollouts} == {(4, 8)}
    expected = [(a, b, c) for a in range(2) for b in range(3) for c in range(3)]
    assert [rollout.branch_path for rollout in group.rollouts] == expected
    assert Branching(**BY_TOKENS).max_rollouts(2) == len(expected)
    plain_group = sample(qwen3, None, ENDLESS, prompts=PROMPTS[:1])[0]  # roots begin as without branching
    for rollout in group.rollouts:
        assert rollout.token_ids[:4] == plain_group.rollouts[rollout.branch_path[0]].token_ids[:4]


def test_rollouts_that_end_before_a_branch_point_do_not_branch(qwen3):
    for group in sample(qwen3, BY_TOKENS):
        for rollout in group.rollouts:
            before = rollout.branch_points[-1] if rollout.branch_points else 0
            assert len(rollout.token_ids) > before
            if len(rollout.branch_points) < 2:
                assert rollout.finish_reason == "stop"
                assert len(rollout.token_ids) <= before + 4


def test_entropy_branches_before_the_most_uncertain_tokens_of_the_roots(qwen3):
    roots = sample(qwen3, None)
    for group, plain_group in zip(sample(qwen3, BY_ENTROPY), roots, strict=True):
        own = [rollout for rollout in group.rollouts if not any(rollout.branch_path[1:])]
        assert [rollout.token_ids for rollout in own] == [rollout.token_ids for rollout in plain_group.rollouts]
        for root in own:
            uncertain = sorted(range(1, len(root.token_ids)), key=lambda place: root.logprobs[place])
            assert root.branch_points == tuple(sorted(uncertain[:2]))
        assert len(group.rollouts) == 2 + sum(2 * len(root.branch_points) for root in own)


@pytest.mark.parametrize(("points", "ran"), [("every_n", 2 + 6), ("entropy", 4)])
def test_no_token_is_encoded_twice(make_model, points, ran):
    """After the prompt, a branch point runs the token before it, and each draw the one before, save the first."""
    model = make_model("llama")
    sample(model, OPTIONS[points], ENDLESS)  # checks the model
    with counted_tokens(model) as counts:
        (group,) = sample(model, OPTIONS[points], ENDLESS, prompts=PROMPTS[:1])
    sampled = sum(map(len, check_tree(group).values()))
    ends = 2 + 6 + 18 if points == "every_n" else 2 + 8  # sequences of all rounds
    assert sum(counts) == len(PROMPTS[0]) + ran + sampled - ends


@pytest.mark.parametrize("points", OPTIONS)
def test_a_tree_depends_on_its_place_alone(qwen3, points):
    """Also with other prompts in the batch, or in another order: ranks sample parts of a batch."""
    run, branching = PlainRun(qwen3), Branching(**OPTIONS[points])
    engine = HFRolloutEngine(qwen3)

    def trees(places):
        rounds = EngineRounds(run, engine, SAMPLING, 2, ("test",), base_seed=0, one_prompt=True)
        with rounds.keeping_caches():
            prompts = [Prompt(PROMPTS[place]) for place in places]
            return dict(zip(places, BranchLoop(branching, 12).run(rounds, prompts, places, 2), strict=True))

    whole = trees([0, 1, 2, 3, 4])
    for part in ([3, 1], [4, 0, 2], []):
        for place, rollouts in trees(part).items():
            assert [r.token_ids for r in rollouts] == [r.token_ids for r in whole[place]]
    assert len({str(rollout.token_ids) for rollouts in whole.values() for rollout in rollouts}) > 20


def test_engines_without_limits_or_indices(qwen3):
    groups = sample(qwen3, BY_TOKENS, engine=Plain())
    check_trees(groups)
    assert worst_logprob_error(qwen3, groups) < 1e-5
    engine = Plain()
    engine.reports = False
    assert all(r.logprobs is None for group in sample(qwen3, BY_TOKENS, engine=engine) for r in group.rollouts)
    with pytest.raises(ValueError, match=r"points='entropy'.*logprobs"):
        sample(qwen3, BY_ENTROPY, engine=engine)


@pytest.mark.parametrize("budget", [24, 60, 1000])
@pytest.mark.parametrize("points", OPTIONS)
def test_the_budget_is_never_exceeded(qwen3, points, budget):
    for sampling in (SAMPLING, ENDLESS):
        groups = sample(qwen3, {**OPTIONS[points], "budget": budget}, sampling)
        free = sample(qwen3, OPTIONS[points], sampling)
        check_trees(groups)
        assert all(count_sampled(group.rollouts) <= budget for group in groups)
        if budget == 1000:
            assert plain_leaves(groups) == plain_leaves(free)
        if budget == 24 and sampling is ENDLESS:
            assert all(rollout.branch_points == () for group in groups for rollout in group.rollouts)


def test_branch_points_open_whole_while_the_budget_lasts():
    branching = Branching("every_n", width=3, depth=2, every_n=4, budget=50)
    # Group 0: 10 sampled, 3 x 8 to come, so 16 to spare: one branch point of 2 x 8. Group 1: 40 - 8 = 32 to spare.
    assert branching.continuations([0, 1, 0, 0], [8, 8, 8, 8], {0: 10, 1: 10}) == [3, 3, 1, 1]
    assert branching.continuations([0, 0], [9, 2], {0: 30}) == [1, 3]  # 9 to spare: not 18, but 4


def test_stop_strings_across_a_branch_point(qwen3, letters):
    """A string that begins before a branch point and ends after it ends the rollout there."""
    branching = {"points": "every_n", "width": 2, "depth": 3, "every_n": 2}
    free = sample(qwen3, branching, ENDLESS, tokenizer=letters())
    texts = [letters().decode(rollout.token_ids) for group in free for rollout in group.rollouts]
    string = Counter(text[1:3] for text in texts).most_common(1)[0][0]  # around the first branch point
    stopping = SamplingConfig(max_new_tokens=12, stop=(string,))
    groups = sample(qwen3, branching, stopping, tokenizer=letters())
    check_trees(groups)
    leaves = [rollout for group in groups for rollout in group.rollouts]
    stopped = [rollout for rollout in leaves if rollout.finish_reason == "stop"]
    assert any(len(rollout.token_ids) == 3 for rollout in stopped)
    for rollout in leaves:
        text = letters().decode(rollout.token_ids)
        assert string not in text[:-1]
        assert (string in text) == (rollout.finish_reason == "stop")


def test_own_tokens():
    assert [first_own_token(path, (3, 7)) for path in [(1, 0, 0), (1, 0, 2), (1, 2, 0), (0, 1, 1)]] == [0, 7, 3, 7]
    assert first_own_token((), ()) == first_own_token((5,), ()) == 0


def test_metrics():
    tree = [
        Rollout([1, 2, 3, 4], branch_points=(2,), branch_path=(0, 0)),
        Rollout([1, 2, 5], branch_points=(2,), branch_path=(0, 1)),
        Rollout([7, 7], loss_mask=[1, 0], branch_path=(1,)),
    ]
    assert count_sampled(tree) == 4 + 1 + 1
    assert count_sampled([Rollout([1])]) is None
    records = [{"sampled": 6, "lengths": [4, 3, 1]}, {"sampled": 2, "lengths": [2]}]
    found = {"branching/leaves": 2.0, "branching/sampled_tokens": 4.0, "branching/token_ratio": 10 / 8}
    assert branch_metrics(records) == found
    assert branch_metrics([{"sampled": None, "lengths": [4]}]) == {}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"points": "turn", "width": 1}, "width is 1"),
        ({"points": "turn", "depth": 0}, "depth is 0"),
        ({"points": "every_n"}, "every_n is None"),
        ({"points": "turn", "every_n": 3}, "every_n is 3"),
        ({"points": "every_n", "every_n": 0}, "every_n is 0"),
        ({"points": "nowhere"}, "points is 'nowhere'"),
        ({"points": "turn", "width": 4, "depth": 9}, "allows 524288"),
        ({"points": "every_n", "every_n": 12}, "every_n is 12.*max_new_tokens=12"),
        ({"points": "turn", "budget": 23}, "budget is 23"),
        ({"points": "entropy"}, "max_new_tokens"),
    ],
)
def test_refused_options(options, named):
    with pytest.raises(ValueError, match=named):
        Branching(**options).check(2, SamplingConfig(max_new_tokens=1) if options["points"] == "entropy" else SAMPLING)


@pytest.mark.parametrize(
    ("points", "path", "words"),
    [
        ((2,), (0,), r"branch_path \(0,\)"),
        ((2,), (), r"branch_path \(\)"),
        ((2, 2), (0, 0, 0), r"branch_points is \(2, 2\)"),
        ((0,), (0, 0), r"branch_points is \(0,\)"),
        ((4,), (0, 0), r"branch_points is \(4,\) .* for 3 token_ids"),
    ],
)
def test_rollouts_refuse_branches_that_do_not_fit(points, path, words):
    with pytest.raises(ValueError, match=words):
        Rollout([1, 2, 3], branch_points=points, branch_path=path)
    assert Rollout([1, 2, 3], branch_points=[1, 3], branch_path=[0, 1, 0]).branch_points == (1, 3)


@pytest.mark.parametrize(
    ("rollouts", "named"),
    [
        ([Rollout([1, 2], loss_mask=[1, 0]) for _ in "ab"], "loss_mask"),
        ([Rollout([1], episode=0), Rollout([2], episode=0), Rollout([3], episode=1)], "episode"),
        ([Rollout([1, 2]) for _ in "abc"], "3 different rollouts of prompt 0"),
        ([Rollout([1, 2, 3, 4]) for _ in "ab"], "finish_reason"),
    ],
)
def test_rollouts_that_cannot_be_continued(qwen3, rollouts, named):
    engine = Plain()
    engine.generate = lambda prompts, *_, **options: [copy.deepcopy(rollouts) for _ in prompts]
    with pytest.raises(ValueError, match=named):
        sample(qwen3, BY_TOKENS, engine=engine)
