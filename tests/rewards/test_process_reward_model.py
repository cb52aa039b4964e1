"""Process reward models: the score of each step, as transformers gives it to each sequence alone."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise

import pytest
import torch
from helpers.qwen_tokenizer import qwen_tokenizer
from helpers.tiny_models import tiny_model

from pl_grouprl.rewards import ProcessRewardModel, RewardConfigurationError, apply_rewards
from pl_grouprl.rewards.models import step_ends
from pl_grouprl.types import Rollout, RolloutGroup

TOKENIZER = qwen_tokenizer()
END = TOKENIZER.eos_token_id


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def classifier(labels=2, kind="TokenClassification", family="qwen2"):
    import transformers

    config = tiny_model(family, vocab_size=len(TOKENIZER), max_position_embeddings=256).config
    config.num_labels = labels
    with torch.random.fork_rng():
        torch.manual_seed(3)
        auto = getattr(transformers, f"AutoModelFor{kind}")
        return auto.from_config(config, dtype=torch.float32).eval()


def make_groups():
    prompts = {"What is 1 + 2?": ["First.\n\nThen 3\n\n", "First.\n\nSo 4", "", "3"], "x": ["one\n\n\n\ntwo\n\nthree"]}
    return [
        RolloutGroup(encode(prompt), [Rollout([*encode(text), END], text=text) for text in texts], prompt=prompt)
        for prompt, texts in prompts.items()
    ]


@torch.no_grad()
def score_one_by_one(model, group, rollout, label=1, step_token=None):
    """A plain loop: the text cut at the separator, each step encoded so far and run alone."""
    row = [None] * len(rollout.token_ids)
    for end in step_ends(rollout.token_ids, TOKENIZER, "\n\n"):
        ids = list(group.prompt_ids)
        for index in range(end + 1):
            ids.append(rollout.token_ids[index])
            if step_token is not None and index in step_ends(rollout.token_ids, TOKENIZER, "\n\n"):
                ids.append(step_token)
        logits = model(torch.tensor([ids])).logits[0, -1]
        row[end] = (logits.softmax(-1)[label] if len(logits) > 1 else logits[0]).item()
    return row


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("a\n\nb\n\n", ["a\n\n", "b\n\n"]),
        ("a\n\nb", ["a\n\n", "b"]),
        ("a.\n\n\nb", ["a.\n\n", "\nb"]),
        ("\n\na\nb\n\n\n\nc", ["\n\na\nb\n\n", "\n\nc"]),
        ("ü\n\n\n\n", ["ü\n\n"]),
        ("a\n", ["a\n"]),
        ("\n\n", []),
        ("", []),
    ],
)
@pytest.mark.parametrize("end", [[], [END]], ids=["cut", "ended"])
def test_where_steps_end(text, ends, end):
    ids = [*encode(text), *end]
    starts = [0, *(index + 1 for index in step_ends(ids, TOKENIZER, "\n\n"))]
    found = [TOKENIZER.decode(ids[a:b]) for a, b in pairwise(starts)]
    assert found == ends


def test_a_separator_of_several_tokens():
    ids = encode("one. Step 2: two Step 3: 4")
    ends = step_ends(ids, TOKENIZER, " Step")
    assert [TOKENIZER.decode(ids[: end + 1]) for end in ends[:2]] == ["one. Step", "one. Step 2: two Step"]
    assert ends[2] == len(ids) - 1


@pytest.mark.parametrize("sharing", ["shared", "repeated"])
@pytest.mark.parametrize("budget", [1, 16384])
@pytest.mark.parametrize(
    ("labels", "label", "step_token"), [(2, 1, None), (3, 2, None), (1, None, None), (2, 0, "<think>")]
)
@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_scores_are_those_of_a_plain_loop(family, labels, label, step_token, budget, sharing):
    model, groups = classifier(labels, family=family), make_groups()
    before = copy.deepcopy(groups)
    reward = ProcessRewardModel(
        model, tokenizer=TOKENIZER, label=label, step_token=step_token, sharing=sharing, max_tokens_per_pass=budget
    )
    token = None if step_token is None else encode(step_token)[0]
    actual = reward.score_groups(groups)
    for group, own in zip(groups, actual, strict=True):
        for rollout, row in zip(group.rollouts, own, strict=True):
            expected = score_one_by_one(model, group, rollout, label or 0, token)
            assert [value is None for value in row] == [value is None for value in expected]
            assert [value for value in row if value is not None] == pytest.approx(
                [value for value in expected if value is not None], abs=1e-5
            )
    scores = [value for own in actual for row in own for value in row if value is not None]
    assert len(scores) == 8
    assert torch.tensor(scores).std() > 1e-3  # a constant would pass otherwise
    assert groups == before


def test_rewards_of_tokens_arrive():
    groups = make_groups()
    reward = ProcessRewardModel(classifier(), tokenizer=TOKENIZER)
    apply_rewards(groups, reward)
    rollout = groups[0].rollouts[0]
    steps = [value for value in rollout.token_rewards if value is not None]
    assert len(steps) == 2
    assert rollout.reward == pytest.approx(sum(steps))
    assert groups[0].rollouts[2].reward == 0.0  # an empty completion has no step


def test_from_a_folder_lazily_and_pickled(tmp_path):
    model = classifier()
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    reward = ProcessRewardModel(str(tmp_path), device="cpu")
    assert len(pickle.dumps(reward)) < 1000
    here = ProcessRewardModel(model, tokenizer=TOKENIZER)
    reward.set_up()
    assert pickle.loads(pickle.dumps(reward)).score_groups(make_groups()) == here.score_groups(make_groups())
    assert reward.run_options() == {
        "model": str(tmp_path), "separator": "\n\n", "label": 1, "tokenizer": str(tmp_path), "step_token": None
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tokenizer": None}, ValueError, "tokenizer is None and model is not a name or folder"),
        ({"max_tokens_per_pass": 0}, ValueError, "max_tokens_per_pass"),
    ],
)
def test_options_are_checked(options, error, message):
    with pytest.raises(error, match=message):
        ProcessRewardModel(classifier(), **{"tokenizer": TOKENIZER, **options})


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (classifier, {"label": 2}, "label is 2, and Qwen2ForTokenClassification has 2 labels"),
        (classifier, {"step_token": "two tokens"}, "step_token 'two tokens' is .* tokens of its tokenizer"),
        (lambda: classifier(kind="CausalLM"), {}, "no single linear layer .*Qwen2ForTokenClassification"),
    ],
    ids=["label", "step token", "no classifier"],
)
def test_what_cannot_work_is_found_at_setup(make, options, message):
    with pytest.raises(RewardConfigurationError, match=message):
        ProcessRewardModel(make(), tokenizer=TOKENIZER, **options).set_up()


def test_a_folder_without_a_token_classifier_is_refused(tmp_path):
    classifier(kind="SequenceClassification").save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    with pytest.raises(RewardConfigurationError, match=r"model is not a checkpoint of a ...ForTokenClassification"):
        ProcessRewardModel(str(tmp_path)).set_up()


def test_other_tokens_than_the_policys_and_episodes_are_refused():
    reward = ProcessRewardModel(classifier(), tokenizer=TOKENIZER)
    group = RolloutGroup([1], [Rollout(encode("4\n\n"), text="five")])
    with pytest.raises(
        RewardConfigurationError, match=r"decodes a completion as '4\\n\\n', and the policy's as 'five'"
    ):
        reward.score_groups([group])
    group = RolloutGroup([1], [Rollout([5], text="5", messages=[{"role": "assistant", "content": "5"}])])
    with pytest.raises(RewardConfigurationError, match="scores completions of one turn"):
        reward.score_groups([group])
