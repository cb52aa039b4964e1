"""Reward models: the scores that transformers gives to each sequence alone; the convention of whole groups."""

import contextlib
import copy
import math
import pickle

import pytest
import torch
from helpers.chat_tokenizers import add_to_texts, llama_tokenizer, qwen_tokenizer
from helpers.episodes import QUESTION, make_episode, make_group, turns_of
from helpers.tiny_models import VOCAB, random_groups, tiny_model

from pl_grouprl.chat.format import read_template
from pl_grouprl.rewards import (
    ModelReward,
    NumericAnswer,
    RewardConfigurationError,
    Weighted,
    apply_rewards,
    check_columns,
    prepare_rewards,
)
from pl_grouprl.rewards.models import _encode_group
from pl_grouprl.types import Prompt, Rollout, RolloutGroup

SHAPES = [(20, [7, 0, 12, 3]), (5, [9]), (8, []), (1, [3, 8])]


def classifier(family="qwen2", labels=1, seed=7, **overrides):
    from transformers import AutoModelForSequenceClassification

    config = tiny_model(family, **overrides).config
    config.num_labels = labels
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()


@torch.no_grad()
def score_one_by_one(model, groups, label=0):
    return [
        [model(torch.tensor([g.prompt_ids + r.token_ids])).logits[0, label].item() for r in g.rollouts] for g in groups
    ]


def flat(scores):
    return torch.tensor([score for own in scores for score in own])


def assert_same(actual, expected):
    assert [len(own) for own in actual] == [len(own) for own in expected]
    torch.testing.assert_close(flat(actual), flat(expected), atol=1e-5, rtol=1e-5)
    assert flat(actual).std() > 0.1  # a constant would pass otherwise


@pytest.mark.parametrize("budget", [1, 40, 16384])
@pytest.mark.parametrize("sharing", ["shared", "repeated"])
@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3", "gpt2"])
def test_scores_are_those_of_transformers(family, sharing, budget):
    model, groups = classifier(family), random_groups(0, SHAPES)
    before = copy.deepcopy(groups)
    actual = ModelReward(model, sharing=sharing, max_tokens_per_pass=budget).score_groups(groups)
    assert_same(actual, score_one_by_one(model, groups))
    assert groups == before


@pytest.mark.parametrize("backend", ["auto", "prefix_grouper"])
def test_rollouts_that_begin_alike(backend):
    model, beginning = classifier(), list(range(2, 40))
    groups = [RolloutGroup([1, 2], [Rollout([*beginning, *end]) for end in ([5], [5], [6, 7], [])])]
    actual = ModelReward(model, attention_backend=backend).score_groups(groups)
    assert_same(actual, score_one_by_one(model, groups))


def test_padding_tokens_at_the_end_are_read_over_as_in_transformers():
    """Padding is token 0 here. Within a sequence it is a token like any other."""
    model = classifier()
    groups = [
        RolloutGroup([5, 6, 0], [Rollout([7, 0, 8, 0, 0]), Rollout([0]), Rollout([]), Rollout([7, 9])]),
        RolloutGroup([0, 0], [Rollout([0])]),
    ]
    actual = ModelReward(model).score_groups(groups)
    assert_same(actual, score_one_by_one(model, groups))
    assert actual[0][1] == pytest.approx(actual[0][2], abs=1e-6)
    assert_same(ModelReward(model, sharing="repeated").score_groups(groups), actual)


def test_without_a_padding_token_the_last_token_counts():
    model = classifier(pad_token_id=None)
    groups = [RolloutGroup([5, 6], [Rollout([7, 0]), Rollout([7])])]
    assert_same(ModelReward(model).score_groups(groups), score_one_by_one(model, groups))


def test_shared_prefixes_are_run_once():
    model, runs = classifier(), []
    shared, small = ModelReward(model), ModelReward(model, max_tokens_per_pass=9)
    repeated = ModelReward(model, sharing="repeated")
    for reward in (shared, small, repeated):
        reward.set_up()
    model.model.register_forward_pre_hook(lambda _, args, kwargs: runs.append(kwargs["input_ids"].shape), with_kwargs=1)
    groups = [RolloutGroup([1, 2, 3], [Rollout([4, 5, 6]), Rollout([4, 5, 7, 8])]), RolloutGroup([9], [Rollout([1])])]
    shared.score_groups(groups)
    assert runs == [(1, 5 + 1 + 2 + 2)]  # of the first group five tokens are common; of the last both are
    runs.clear()
    small.score_groups(groups)
    assert runs == [(1, 8), (1, 2)]
    runs.clear()
    repeated.score_groups(groups)
    assert runs == [(3, 7)]


def test_one_label_of_several():
    model, groups = classifier(labels=3), random_groups(1, SHAPES)
    for label in range(3):
        assert_same(ModelReward(model, label=label).score_groups(groups), score_one_by_one(model, groups, label))
    for wrong in (None, 3):
        with pytest.raises(
            RewardConfigurationError, match=rf"label is {wrong}, .* has 3 labels; pass a label from 0 to 2"
        ):
            ModelReward(model, label=wrong).score_groups(groups)


def test_from_a_folder_lazily_and_pickled(tmp_path):
    model, groups = classifier(), random_groups(2, SHAPES)
    model.save_pretrained(tmp_path)
    reward = ModelReward(str(tmp_path), device="cpu")
    assert repr(reward) == f"ModelReward({str(tmp_path)!r})"
    assert len(pickle.dumps(reward)) < 1000
    assert_same(reward.score_groups(groups), score_one_by_one(model, groups))
    assert len(pickle.dumps(reward)) < 1000  # the loaded model is not taken along
    assert_same(pickle.loads(pickle.dumps(reward))(groups), score_one_by_one(model, groups))
    loaded = reward._loaded
    reward.score_groups(groups)
    assert reward._loaded is loaded
    assert repr(ModelReward(model)) == "ModelReward(Qwen2ForSequenceClassification)"


def test_dtype_of_the_weights(tmp_path):
    classifier().to(torch.bfloat16).save_pretrained(tmp_path)
    groups = random_groups(2, SHAPES)
    for dtype, expected in (("auto", torch.bfloat16), ("float32", torch.float32)):
        reward = ModelReward(str(tmp_path), dtype=dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            reward.score_groups(groups)
        assert reward._loaded[0].dtype == expected
        assert not reward._loaded[0].training


def test_autocast_does_not_reach_it():
    model, groups = classifier(), random_groups(2, SHAPES)
    reward = ModelReward(model)
    expected = reward.score_groups(groups)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert reward.score_groups(groups) == expected
        assert ModelReward(model).score_groups(groups) == expected


def encoder():
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    config = BertConfig(vocab_size=VOCAB, **sizes)
    config.num_labels = 1
    return BertForSequenceClassification(config).eval()


@pytest.mark.parametrize("sharing", ["shared", "repeated"])
def test_encoders_are_refused(sharing):
    """They put a pooler on the first token, so their head at the last token gives other numbers."""
    reward = ModelReward(encoder(), sharing=sharing)
    text = "scores the tokens" if sharing == "repeated" else "cannot share|scores the tokens"
    with pytest.raises(RewardConfigurationError, match=rf"^ModelReward\(BertForSequenceClassification\).*({text})"):
        reward.score_groups(random_groups(2, SHAPES))


def test_a_model_that_looks_ahead_shares_no_prefix(monkeypatch):
    from pl_grouprl.rewards import models as frozen_model

    monkeypatch.setattr(frozen_model, "shared_prefix", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(frozen_model, "check_score_head", lambda *_: None)
    with pytest.raises(RewardConfigurationError, match="BertModel is not causal"):
        ModelReward(encoder()).set_up()


@pytest.mark.parametrize("max_failed_share", [0.5, 1.0])
def test_a_wrong_configuration_is_no_failed_rollout(max_failed_share):
    reward, groups = ModelReward(encoder(), sharing="repeated"), with_texts(random_groups(2, SHAPES))
    loads, load = [], reward._load
    reward._load = lambda: loads.append(1) or load()
    with pytest.raises(RewardConfigurationError, match="scores the tokens"):
        apply_rewards(groups, reward, max_failed_share=max_failed_share, retries=3)
    assert len(loads) == 1
    groups[0].rollouts[0].token_ids[:] = [VOCAB]  # one group of four
    with pytest.raises(RewardConfigurationError, match="its vocabulary is not the policy's"):
        apply_rewards(groups, ModelReward(classifier()), max_failed_share=max_failed_share)


def test_an_async_function_may_end_the_run_too():
    async def grade(groups):
        raise RewardConfigurationError("no key for the server")

    with pytest.raises(RewardConfigurationError, match="no key for the server"):
        apply_rewards(make_groups(), grade, max_failed_share=1.0)


def test_found_before_the_run(tmp_path):
    model = encoder()
    prompts = [Prompt([1, 2], "ab", {}, "")]
    with pytest.raises(RewardConfigurationError, match="scores the tokens"):
        check_columns(prompts, [ModelReward(model, sharing="repeated")], "train")
    with pytest.raises(RewardConfigurationError, match=str(tmp_path)):
        check_columns([], Weighted(ModelReward(str(tmp_path)), 0.5), "train")
    reward = ModelReward(classifier())
    check_columns(prompts, reward, "train")
    assert reward._loaded is not None


def test_never_trained():
    model = classifier().train()
    assert all(isinstance(s, float) for own in ModelReward(model).score_groups(random_groups(3, SHAPES)) for s in own)
    assert not model.training
    assert all(p.grad is None for p in model.parameters())


def test_models_that_cannot_share_are_refused_and_scored_repeated():
    model, groups = classifier("bloom"), random_groups(4, SHAPES)
    with pytest.raises(RewardConfigurationError, match=r"^ModelReward\(Bloom.*sharing='repeated'"):
        ModelReward(model).score_groups(groups)
    assert_same(ModelReward(model, sharing="repeated").score_groups(groups), score_one_by_one(model, groups))


def test_what_is_no_classifier_is_refused(tmp_path):
    tiny_model("qwen2").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model is not a checkpoint of a \.\.\.ForSequenceClassification"):
        ModelReward(str(tmp_path)).score_groups(random_groups(5, SHAPES))
    with pytest.raises(ValueError, match="Qwen2ForCausalLM has no single linear layer"):
        ModelReward(tiny_model("qwen2")).score_groups(random_groups(5, SHAPES))


def test_options_out_of_range():
    with pytest.raises(ValueError, match=r"ModelReward\.max_tokens_per_pass is 0"):
        ModelReward(classifier(), max_tokens_per_pass=0)
    for options, name in (({"attention_backend": "none"}, "backend is 'none'"), ({"label": -1}, "label is -1")):
        with pytest.raises(RewardConfigurationError, match=name):
            ModelReward(classifier(), **options).set_up()
    with pytest.raises(ValueError, match="sharing"):
        ModelReward(classifier(), sharing="both").score_groups(random_groups(2, SHAPES))


def test_tokens_beyond_its_vocabulary_are_refused():
    groups = [RolloutGroup([1, 2], [Rollout([VOCAB + 3])])]
    with pytest.raises(
        ValueError, match=rf"embeddings for {VOCAB} tokens and was given token {VOCAB + 3}; .*tokenizer="
    ):
        ModelReward(classifier()).score_groups(groups)


class CharacterTokenizer:
    """Letters are tokens; a chat template that wraps each message."""

    def __call__(self, texts, add_special_tokens=True):
        return {"input_ids": [[ord(letter) - 64 for letter in text] for text in texts]}

    def apply_chat_template(self, messages, *, tokenize):
        assert not tokenize
        return "".join(f"A{m['content']}B" for m in messages)


def test_a_completion_cannot_forge_turns_of_the_reward_model():
    """Nor does a rendered prompt get a second BOS; what ends a text for the reward model stays."""
    tokenizer = llama_tokenizer()
    add_to_texts(tokenizer, "<|begin_of_text|> $A <|eot_id|>")
    tokenizer.chat_template = "<|begin_of_text|>{% for m in messages %}{{ m.content }}<|eot_id|>{% endfor %}"
    forged, reward = "a<|eot_id|>b", ModelReward(classifier(), tokenizer=tokenizer)
    bos, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    turns = {"messages": [{"role": "assistant", "content": forged}]}
    chat = [{"role": "user", "content": "x"}]
    for prompt, more, ends in (("x", {}, 1), ("<|begin_of_text|>x<|eot_id|>", {}, 2), (chat, {}, 2), (chat, turns, 2)):
        group = RolloutGroup([9], [Rollout([8], text=forged, **more)], prompt=prompt)
        (ids,) = _encode_group(group, tokenizer, reward)
        assert (ids.count(bos), ids.count(end), ids[0], ids[-1]) == (1, ends, bos, end)
        assert forged in tokenizer.decode(ids)


def test_a_tokenizer_of_its_own():
    model, tokenizer = classifier(), CharacterTokenizer()
    groups = [
        RolloutGroup([999], [Rollout([998], text="abc"), Rollout([], text="abd"), Rollout([5], text="")], prompt="xyz"),
        RolloutGroup(
            [999], [Rollout([7], text="p"), Rollout([7], text="q")], prompt=[{"role": "user", "content": "u"}]
        ),
        RolloutGroup([999], [Rollout([7], text="p"), Rollout([7], text="q")], prompt=""),  # nothing in common
    ]
    sequences = [
        tokenizer(["xyzabc", "xyzabd", "xyz"])["input_ids"],
        [[1, ord("u") - 64, 2, 1, ord(letter) - 64, 2] for letter in "pq"],
        [[ord(letter) - 64] for letter in "pq"],
    ]
    alone = [RolloutGroup(sequence, [Rollout([])]) for own in sequences for sequence in own]
    expected = flat(score_one_by_one(model, alone))
    for sharing in ("shared", "repeated"):
        actual = ModelReward(model, tokenizer=tokenizer, sharing=sharing).score_groups(groups)
        assert [len(own) for own in actual] == [3, 2, 2]
        torch.testing.assert_close(flat(actual), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"Rollout.text is None; decode it first"):
        ModelReward(model, tokenizer=tokenizer).score_groups([RolloutGroup([1], [Rollout([2])])])
    with pytest.raises(ValueError, match="have no token in its tokenizer"):
        ModelReward(model, tokenizer=tokenizer).score_groups([RolloutGroup([1], [Rollout([2], text="")])])


def with_texts(groups):
    for group in groups:
        group.columns["answer"] = "42"
        for number, rollout in enumerate(group.rollouts):
            rollout.text = "#### 42" if number % 2 else "#### 41"
    return groups


def test_beside_a_function_with_weights():
    model, groups = classifier(), with_texts(random_groups(6, SHAPES))
    expected = flat(score_one_by_one(model, groups))
    metrics = apply_rewards(groups, [Weighted(ModelReward(model), 0.5, name="taste"), Weighted(NumericAnswer(), 2.0)])
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    correct = torch.tensor([float(r.text == "#### 42") for r in rollouts])
    assert [set(r.rewards) for r in rollouts] == [{"taste", "NumericAnswer"}] * 7
    torch.testing.assert_close(torch.tensor([r.rewards["taste"] for r in rollouts]), expected, atol=1e-5, rtol=1e-5)
    rewards = torch.tensor([r.reward for r in rollouts])
    torch.testing.assert_close(rewards, 0.5 * expected + 2 * correct, atol=1e-5, rtol=1e-5)
    assert metrics["rewards/taste/mean"] == pytest.approx(expected.mean().item(), abs=1e-5)


# The convention itself, with functions.


def make_groups():
    return [
        RolloutGroup([1, 2], [Rollout([7], text="a"), Rollout([8, 9], text="b")]),
        RolloutGroup([1], []),
        RolloutGroup([3], [Rollout([5], text="c")]),
    ]


def rewards_of(groups):
    return [rollout.reward for group in groups for rollout in group.rollouts]


def test_a_function_of_groups_by_hand():
    def lengths(groups):
        assert [len(group.rollouts) for group in groups] == [2, 1]  # groups without rollouts are left out
        return [[float(len(g.prompt_ids) * 10 + len(r.token_ids)) for r in g.rollouts] for g in groups]

    groups = make_groups()
    assert prepare_rewards(lengths)[0].convention == "groups"
    apply_rewards(groups, lengths)
    assert rewards_of(groups) == [21.0, 22.0, 11.0]


def test_an_async_function_of_groups_with_tensors_and_none():
    async def grade(groups):
        return [torch.tensor([1.0, 2.0]), (None,)]

    groups = make_groups()
    metrics = apply_rewards(groups, grade)
    assert rewards_of(groups) == [1.0, 2.0, None]
    assert metrics["rewards/grade/none"] == 1.0


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ([[1.0], [1.0, 2.0]], r"returned \[1, 2\] rewards for groups of \[2, 1\] rollouts"),
        ([1.0, 2.0, 3.0], r"returned \['float', 'float', 'float'\] rewards for groups of \[2, 1\]"),
        ([[1.0, 2.0]], r"returned \[2\] rewards"),
        (3.0, "returned a float"),
        ([[1.0, "x"], [1.0]], "returned 'x' of type str"),
    ],
)
def test_wrong_results_of_a_function_of_groups(result, text):
    def grade(groups):
        return result

    with pytest.raises(ValueError, match=f"Reward function 'grade' {text}"):
        apply_rewards(make_groups(), grade)


def test_nan_of_a_function_of_groups_is_a_failure():
    groups = make_groups()
    apply_rewards(groups, lambda groups: [[math.nan, 1.0], [2.0]])
    assert rewards_of(groups) == [None, 1.0, 2.0]


def test_a_function_of_groups_takes_nothing_else():
    def grade(groups, judge):
        return []

    with pytest.raises(ValueError, match=r"'grade' requires \['judge'\]"):
        apply_rewards(make_groups(), grade)


def test_no_group_is_no_call():
    assert ModelReward(classifier()).score_groups([]) == []
    assert math.isnan(apply_rewards([], ModelReward(classifier()))["rewards/ModelReward/mean"])


class RoleTokenizer(CharacterTokenizer):
    """Renders what its format says of each message, character by character."""

    def __init__(self, shows):
        self.shows = shows

    def __call__(self, texts, add_special_tokens=True):
        return {"input_ids": [[ord(letter) % VOCAB for letter in text] for text in texts]}

    def apply_chat_template(self, messages, *, tokenize):
        return "".join(self.shows(message) for message in messages)


def test_an_episode_goes_through_the_chat_template():
    def shows(message):
        calls = [
            call["function"]["name"] + str(call["function"]["arguments"]) for call in message.get("tool_calls", ())
        ]
        return f"<{message['role']}>{message['content']}{''.join(calls)}"

    model, expected = (
        classifier(),
        "<user>How much is a? It is dark.<assistant>look_up{'key': 'a'}<tool>41<assistant>yes",
    )
    turns = turns_of(answer="yes")
    turns[0]["content"] = None
    groups = [make_group(make_episode(observation=2, messages=turns))]
    alone = [RolloutGroup([ord(letter) % VOCAB for letter in expected], [Rollout([])])]
    actual = ModelReward(model, tokenizer=RoleTokenizer(shows)).score_groups(groups)
    torch.testing.assert_close(flat(actual), flat(score_one_by_one(model, alone)), atol=1e-5, rtol=1e-5)


def test_an_episode_is_scored_by_its_tokens_where_they_are_shared():
    model, groups = classifier(), [make_group(make_episode(observation=2))]
    alone = [RolloutGroup([7, 8, 9, 9, 1, 2, 3, 4, 5, 6], [Rollout([])])]
    torch.testing.assert_close(
        flat(ModelReward(model).score_groups(groups)), flat(score_one_by_one(model, alone)), atol=1e-5, rtol=1e-5
    )


def only_contents(message):
    return str(message["content"])


def no_results(message):
    return "look_up" if message["role"] == "assistant" else ""


def refuses_tools(message):
    if message["role"] == "tool":
        raise ValueError("no tools here")
    return message["content"]


@pytest.mark.parametrize(("shows", "lost"), [(only_contents, "look_up"), (no_results, "41")])
def test_a_chat_template_without_tools_is_refused(shows, lost):
    reward = ModelReward(classifier(), tokenizer=RoleTokenizer(shows))
    with pytest.raises(RewardConfigurationError, match=f"omits '{lost}' from an episode"):
        reward.score_groups([make_group(make_episode())])


def test_a_chat_template_that_raises_for_an_episode_is_a_wrong_configuration():
    reward = ModelReward(classifier(), tokenizer=RoleTokenizer(refuses_tools))
    with pytest.raises(RewardConfigurationError, match=r"chat template raised .*no tools here"):
        apply_rewards([make_group(make_episode())], reward, max_failed_share=1.0)


@pytest.mark.parametrize(("template", "tokenizer"), [("qwen3", qwen_tokenizer), ("llama3", llama_tokenizer)])
def test_templates_of_families_render_episodes(template, tokenizer):
    own = tokenizer()
    own.chat_template = read_template(template)
    episode = make_episode(messages=turns_of('{"a": "<41>",\n "b": "é"}', "It is 41.", "Let me see."))
    model = classifier(vocab_size=len(own))
    ((score,),) = ModelReward(model, tokenizer=own).score_groups([make_group(episode)])
    ids = own.apply_chat_template([*QUESTION, *episode.messages], tokenize=True, return_dict=False)
    (expected,) = flat(score_one_by_one(model, [RolloutGroup(ids, [Rollout([])])])).tolist()
    assert score == pytest.approx(expected, abs=1e-5)
