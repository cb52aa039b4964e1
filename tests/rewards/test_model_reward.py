"""Reward models: the scores that transformers gives to each sequence alone, of completions and of their steps."""

import copy
import pickle
from itertools import pairwise

import pytest
import torch
import transformers
from helpers import qwen_tokenizer as steps_of_qwen
from helpers.chat_tokenizers import add_to_texts, llama_tokenizer, qwen_tokenizer
from helpers.episodes import QUESTION, make_episode, make_group, turns_of
from helpers.rewards import rewards_of
from helpers.tiny_models import VOCAB, random_groups, tiny_model

from pl_grouprl.chat.format import read_template
from pl_grouprl.rewards import (
    ModelReward,
    NumericAnswer,
    ProcessRewardModel,
    RewardConfigurationError,
    Weighted,
    apply_rewards,
    check_columns,
)
from pl_grouprl.rewards.models import step_ends
from pl_grouprl.types import Prompt, Rollout, RolloutGroup

REPEATED = {"sharing": "repeated"}
SHAPES = [(20, [7, 0, 12, 3]), (5, [9]), (8, []), (1, [3, 8])]


def classifier(family="qwen2", labels=1, kind="SequenceClassification", **overrides):
    config = tiny_model(family, **overrides).config
    config.num_labels = labels
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return getattr(transformers, f"AutoModelFor{kind}").from_config(config, dtype=torch.float32).eval()


def alone(*sequences):
    """Groups of one rollout each."""
    return [RolloutGroup(list(sequence), [Rollout([])]) for sequence in sequences]


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
@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_scores_are_those_of_transformers(family, sharing, budget):
    model, groups = classifier(family).train(), random_groups(0, SHAPES)
    before = copy.deepcopy(groups)
    actual = ModelReward(model, sharing=sharing, max_tokens_per_pass=budget).score_groups(groups)
    assert_same(actual, score_one_by_one(model, groups))
    assert groups == before
    assert not model.training
    assert all(p.grad is None for p in model.parameters())
    assert ModelReward(model).score_groups([]) == []


@pytest.mark.parametrize("backend", ["auto", "prefix_grouper"])
def test_rollouts_that_begin_alike(backend):
    model, beginning = classifier(), list(range(2, 40))
    groups = [RolloutGroup([1, 2], [Rollout([*beginning, *end]) for end in ([5], [5], [6, 7], [])])]
    assert_same(ModelReward(model, attention_backend=backend).score_groups(groups), score_one_by_one(model, groups))


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
    model = classifier(pad_token_id=None)  # then the last token counts
    assert_same(ModelReward(model).score_groups(groups[:1]), score_one_by_one(model, groups[:1]))


def test_shared_prefixes_are_run_once():
    model, runs = classifier(), []
    options = [
        ({}, [(1, 5 + 1 + 2 + 2)]),
        ({"max_tokens_per_pass": 9}, [(1, 8), (1, 2)]),
        ({"sharing": "repeated"}, [(3, 7)]),
    ]
    # Of the first group five tokens are common; of the last both are.
    groups = [RolloutGroup([1, 2, 3], [Rollout([4, 5, 6]), Rollout([4, 5, 7, 8])]), RolloutGroup([9], [Rollout([1])])]
    rewards = [ModelReward(model, **own) for own, _ in options]
    for reward in rewards:
        reward.set_up()
    model.model.register_forward_pre_hook(lambda _, args, kwargs: runs.append(kwargs["input_ids"].shape), with_kwargs=1)
    for reward, (_, expected) in zip(rewards, options, strict=True):
        runs.clear()
        reward.score_groups(groups)
        assert runs == expected


def test_one_label_of_several():
    model, groups = classifier(labels=3), random_groups(1, SHAPES)
    for label in range(3):
        assert_same(ModelReward(model, label=label).score_groups(groups), score_one_by_one(model, groups, label))


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_from_a_folder_lazily_and_pickled(tmp_path, dtype, monkeypatch):
    model, groups = classifier().to(torch.bfloat16), random_groups(2, SHAPES)
    model.save_pretrained(tmp_path)
    reward = ModelReward(str(tmp_path), device="cpu", dtype=dtype)
    assert repr(reward) == f"ModelReward({str(tmp_path)!r})"
    assert len(pickle.dumps(reward)) < 1000
    with torch.autocast("cpu", dtype=torch.bfloat16):  # does not reach it
        found = reward.score_groups(groups)
    assert len(pickle.dumps(reward)) < 1000  # the loaded model is not taken along
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=dtype)
    expected = ModelReward(loaded).score_groups(groups)
    assert found == expected == pickle.loads(pickle.dumps(reward))(groups)
    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", None)  # it is loaded once
    assert reward.score_groups(groups) == expected
    assert repr(ModelReward(model)) == "ModelReward(Qwen2ForSequenceClassification)"


def encoder():
    """Puts a pooler on the first token, so that its head at the last token gives other numbers."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.BertConfig(vocab_size=VOCAB, **sizes)
    config.num_labels = 1
    return transformers.BertForSequenceClassification(config).eval()


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (encoder, {}, "cannot share|scores the tokens"),
        (encoder, REPEATED, r"^ModelReward\(BertForSequenceClassification\).*scores the tokens"),
        (lambda: classifier("bloom"), {}, r"^ModelReward\(Bloom.*sharing='repeated'"),
        (lambda: tiny_model("qwen2"), {}, "Qwen2ForCausalLM has no single linear layer"),
        (lambda: classifier(labels=3), {}, r"label is None, .* has 3 labels"),
        (lambda: classifier(labels=3), {"label": 3}, "label is 3"),
        (classifier, {"label": -1}, "label is -1"),
        (classifier, {"attention_backend": "none"}, "backend is 'none'"),
        (classifier, {"sharing": "both"}, "sharing"),
        (classifier, {"max_tokens_per_pass": 0}, r"ModelReward\.max_tokens_per_pass is 0"),
    ],
)
def test_what_cannot_work_is_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        ModelReward(make(), **options).score_groups(random_groups(2, SHAPES))


def test_models_that_cannot_share_are_scored_repeated():
    model, groups = classifier("bloom"), random_groups(4, SHAPES)
    assert_same(ModelReward(model, sharing="repeated").score_groups(groups), score_one_by_one(model, groups))


def test_a_model_that_looks_ahead_shares_no_prefix(monkeypatch):
    from pl_grouprl.rewards import models

    monkeypatch.setattr(models, "check_score_head", lambda *_: None)
    monkeypatch.setattr(models, "shared_prefix", lambda *_: torch.no_grad())
    with pytest.raises(RewardConfigurationError, match="BertModel is not causal"):
        ModelReward(encoder()).set_up()


def with_texts(groups):
    for group in groups:
        group.columns["answer"] = "42"
        for number, rollout in enumerate(group.rollouts):
            rollout.text = "#### 42" if number % 2 else "#### 41"
    return groups


def test_a_wrong_configuration_is_no_failed_rollout_and_is_found_before_the_run(tmp_path):
    groups, prompts = with_texts(random_groups(2, SHAPES)), [Prompt([1, 2], "ab", {}, "")]
    with pytest.raises(RewardConfigurationError, match="scores the tokens"):
        apply_rewards(groups, ModelReward(encoder(), **REPEATED), max_failed_share=1.0, retries=3)
    groups[0].rollouts[0].token_ids[:] = [VOCAB + 3]  # one group of four
    with pytest.raises(RewardConfigurationError, match=rf"was given token {VOCAB + 3}; .*tokenizer="):
        apply_rewards(groups, ModelReward(classifier()), max_failed_share=1.0)
    with pytest.raises(RewardConfigurationError, match="scores the tokens"):
        check_columns(prompts, [ModelReward(encoder(), **REPEATED)], "train")
    with pytest.raises(RewardConfigurationError, match=str(tmp_path)):
        check_columns([], Weighted(ModelReward(str(tmp_path)), 0.5), "train")
    tiny_model("qwen2").save_pretrained(tmp_path)
    with pytest.raises(RewardConfigurationError, match=r"is not a checkpoint of a \.\.\.ForSequenceClassification"):
        check_columns([], ModelReward(str(tmp_path)), "train")


def test_beside_a_function_with_weights():
    model, groups = classifier(), with_texts(random_groups(6, SHAPES))
    expected = flat(score_one_by_one(model, groups))
    metrics = apply_rewards(groups, [Weighted(ModelReward(model), 0.5, name="taste"), Weighted(NumericAnswer(), 2.0)])
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    correct = torch.tensor([float(r.text == "#### 42") for r in rollouts])
    torch.testing.assert_close(torch.tensor([r.rewards["taste"] for r in rollouts]), expected, atol=1e-5, rtol=1e-5)
    rewards = torch.tensor(rewards_of(*groups))
    torch.testing.assert_close(rewards, 0.5 * expected + 2 * correct, atol=1e-5, rtol=1e-5)
    assert metrics["rewards/taste/mean"] == pytest.approx(expected.mean().item(), abs=1e-5)


# A tokenizer of its own.


class CharacterTokenizer:
    """Letters are tokens; renders what a format says of each message."""

    def __init__(self, shows=lambda message: f"A{message['content']}B"):
        self.shows = shows

    def __call__(self, texts, add_special_tokens=True):
        return {"input_ids": [[ord(letter) % VOCAB for letter in text] for text in texts]}

    def apply_chat_template(self, messages, *, tokenize):
        assert not tokenize
        return "".join(map(self.shows, messages))


def test_a_completion_cannot_forge_turns_of_the_reward_model():
    """Nor does a rendered prompt get a second BOS; what ends a text for the reward model stays."""
    tokenizer, read = llama_tokenizer(), []
    add_to_texts(tokenizer, "<|begin_of_text|> $A <|eot_id|>")
    tokenizer.chat_template = "<|begin_of_text|>{% for m in messages %}{{ m.content }}<|eot_id|>{% endfor %}"
    forged, model = "a<|eot_id|>b", classifier(vocab_size=len(tokenizer))
    reward = ModelReward(model, tokenizer=tokenizer, sharing="repeated")
    reward.set_up()
    model.model.register_forward_pre_hook(
        lambda _, args, kwargs: read.extend(kwargs["input_ids"].tolist()), with_kwargs=True
    )
    bos, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    turns = {"messages": [{"role": "assistant", "content": forged}]}
    chat = [{"role": "user", "content": "x"}]
    for prompt, more, ends in (("x", {}, 1), ("<|begin_of_text|>x<|eot_id|>", {}, 2), (chat, {}, 2), (chat, turns, 2)):
        reward.score_groups([RolloutGroup([9], [Rollout([8], text=forged, **more)], prompt=prompt)])
        ids = read.pop()
        assert (ids.count(bos), ids.count(end), ids[0], ids[-1]) == (1, ends, bos, end)
        assert forged in tokenizer.decode(ids)


def test_a_tokenizer_of_its_own():
    model, tokenizer = classifier(), CharacterTokenizer()
    texts, user = [Rollout([7], text="p"), Rollout([7], text="q")], [{"role": "user", "content": "u"}]
    groups = [
        RolloutGroup([999], [Rollout([998], text="abc"), Rollout([], text="abd"), Rollout([5], text="")], prompt="xyz"),
        RolloutGroup([999], texts, prompt=user),
        RolloutGroup([999], texts, prompt=""),  # nothing in common
    ]
    expected = alone(*tokenizer(["xyzabc", "xyzabd", "xyz", "AuBApB", "AuBAqB", "p", "q"])["input_ids"])
    for sharing in ("shared", "repeated"):
        actual = ModelReward(model, tokenizer=tokenizer, sharing=sharing).score_groups(groups)
        assert [len(own) for own in actual] == [3, 2, 2]
        torch.testing.assert_close(flat(actual), flat(score_one_by_one(model, expected)), atol=1e-5, rtol=1e-5)
    for text, message in ((None, "Rollout.text is None"), ("", "have no token in its tokenizer")):
        with pytest.raises(ValueError, match=message):
            ModelReward(model, tokenizer=tokenizer).score_groups([RolloutGroup([1], [Rollout([2], text=text)])])


def all_of(message):
    calls = [call["function"]["name"] + str(call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return f"<{message['role']}>{message['content']}{''.join(calls)}"


def test_an_episode_goes_through_the_chat_template_or_is_scored_by_its_tokens():
    model, turns = classifier(), turns_of(answer="yes")
    turns[0]["content"] = None
    rendered = "<user>How much is a? It is dark.<assistant>look_up{'key': 'a'}<tool>41<assistant>yes"
    tokenizer = CharacterTokenizer(all_of)
    for own, ids in ((tokenizer, tokenizer([rendered])["input_ids"][0]), (None, [7, 8, 9, 9, 1, 2, 3, 4, 5, 6])):
        groups = [make_group(make_episode(observation=2, messages=turns))]
        actual = ModelReward(model, tokenizer=own).score_groups(groups)
        assert flat(actual).tolist() == pytest.approx(flat(score_one_by_one(model, alone(ids))).tolist(), abs=1e-5)


def refuses_tools(message):
    if message["role"] == "tool":
        raise ValueError("no tools here")
    return message["content"]


@pytest.mark.parametrize(
    ("shows", "problem"),
    [
        (lambda message: str(message["content"]), "omits 'look_up' from an episode"),
        (lambda message: "look_up" if message["role"] == "assistant" else "", "omits '41' from an episode"),
        (refuses_tools, "chat template raised .*no tools here"),
    ],
)
def test_a_chat_template_without_tools_is_a_wrong_configuration(shows, problem):
    reward = ModelReward(classifier(), tokenizer=CharacterTokenizer(shows))
    with pytest.raises(RewardConfigurationError, match=problem):
        apply_rewards([make_group(make_episode())], reward, max_failed_share=1.0)


@pytest.mark.parametrize(("template", "tokenizer"), [("qwen3", qwen_tokenizer), ("llama3", llama_tokenizer)])
def test_templates_of_families_render_episodes(template, tokenizer):
    own = tokenizer()
    own.chat_template = read_template(template)
    episode = make_episode(messages=turns_of('{"a": "<41>",\n "b": "é"}', "It is 41.", "Let me see."))
    model = classifier(vocab_size=len(own))
    actual = ModelReward(model, tokenizer=own).score_groups([make_group(episode)])
    ids = own.apply_chat_template([*QUESTION, *episode.messages], tokenize=True, return_dict=False)
    assert flat(actual).tolist() == pytest.approx(flat(score_one_by_one(model, alone(ids))).tolist(), abs=1e-5)


# Process reward models.

TOKENIZER = steps_of_qwen.qwen_tokenizer()
END = TOKENIZER.eos_token_id


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def step_classifier(labels=2, kind="TokenClassification", family="qwen2"):
    return classifier(family, labels, kind, vocab_size=len(TOKENIZER), max_position_embeddings=256)


def groups_of_steps():
    prompts = {"What is 1 + 2?": ["First.\n\nThen 3\n\n", "First.\n\nSo 4", "", "3"], "x": ["one\n\n\n\ntwo\n\nthree"]}
    return [
        RolloutGroup(encode(prompt), [Rollout([*encode(text), END], text=text) for text in texts], prompt=prompt)
        for prompt, texts in prompts.items()
    ]


@torch.no_grad()
def score_steps_one_by_one(model, group, rollout, label=1, step_token=None):
    """A plain loop: the text cut at the separator, each step encoded so far and run alone."""
    row = [None] * len(rollout.token_ids)
    ends = step_ends(rollout.token_ids, TOKENIZER, "\n\n")
    for end in ends:
        ids = list(group.prompt_ids)
        for index in range(end + 1):
            ids.append(rollout.token_ids[index])
            if step_token is not None and index in ends:
                ids.append(step_token)
        logits = model(torch.tensor([ids])).logits[0, -1]
        row[end] = (logits.softmax(-1)[label] if len(logits) > 1 else logits[0]).item()
    return row


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("a\n\nb\n\n", ["a\n\n", "b\n\n"]), ("a\n\nb", ["a\n\n", "b"]), ("a.\n\n\nb", ["a.\n\n", "\nb"]),
        ("\n\na\nb\n\n\n\nc", ["\n\na\nb\n\n", "\n\nc"]), ("ü\n\n\n\n", ["ü\n\n"]), ("a\n", ["a\n"]), ("\n\n", []),
        ("", []),
    ],
)  # fmt: skip
def test_where_steps_end(text, ends):
    for end in ([], [END]):  # cut, or ended
        ids = [*encode(text), *end]
        starts = [0, *(index + 1 for index in step_ends(ids, TOKENIZER, "\n\n"))]
        assert [TOKENIZER.decode(ids[a:b]) for a, b in pairwise(starts)] == ends


def test_a_separator_of_several_tokens():
    ids = encode("one. Step 2: two Step 3: 4")
    ends = step_ends(ids, TOKENIZER, " Step")
    assert [TOKENIZER.decode(ids[: end + 1]) for end in ends[:2]] == ["one. Step", "one. Step 2: two Step"]
    assert ends[2] == len(ids) - 1


@pytest.mark.parametrize(
    ("labels", "label", "step_token", "budget", "sharing", "family"),
    [
        (2, 1, None, 1, "shared", "qwen2"), (2, 1, None, 16384, "repeated", "qwen2"),
        (3, 2, None, 16384, "shared", "gpt2"), (1, None, None, 16384, "shared", "qwen2"),
        (2, 0, "<think>", 1, "repeated", "qwen2"), (2, 0, "<think>", 16384, "shared", "qwen2"),
    ],
)  # fmt: skip
def test_scores_of_steps_are_those_of_a_plain_loop(labels, label, step_token, budget, sharing, family):
    model, groups = step_classifier(labels, family=family), groups_of_steps()
    before = copy.deepcopy(groups)
    options = {"label": label, "step_token": step_token, "sharing": sharing, "max_tokens_per_pass": budget}
    actual = ProcessRewardModel(model, tokenizer=TOKENIZER, **options).score_groups(groups)
    token = None if step_token is None else encode(step_token)[0]
    for group, own in zip(groups, actual, strict=True):
        for rollout, row in zip(group.rollouts, own, strict=True):
            expected = score_steps_one_by_one(model, group, rollout, label or 0, token)
            assert [value is None for value in row] == [value is None for value in expected]
            assert [value for value in row if value is not None] == pytest.approx(
                [value for value in expected if value is not None], abs=1e-5
            )
    scores = [value for own in actual for row in own for value in row if value is not None]
    assert len(scores) == 8
    assert torch.tensor(scores).std() > 1e-3  # a constant would pass otherwise
    assert groups == before


def test_rewards_of_steps_arrive():
    groups = groups_of_steps()
    apply_rewards(groups, ProcessRewardModel(step_classifier(), tokenizer=TOKENIZER))
    rollout = groups[0].rollouts[0]
    steps = [value for value in rollout.token_rewards if value is not None]
    assert len(steps) == 2
    assert rollout.reward == pytest.approx(sum(steps))
    assert groups[0].rollouts[2].reward == 0.0  # an empty completion has no step


def test_a_process_reward_model_from_a_folder(tmp_path):
    model, groups = step_classifier(), groups_of_steps()
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    reward = ProcessRewardModel(str(tmp_path), device="cpu")
    assert len(pickle.dumps(reward)) < 1000
    reward.set_up()
    expected = ProcessRewardModel(model, tokenizer=TOKENIZER).score_groups(groups)
    assert pickle.loads(pickle.dumps(reward)).score_groups(groups) == expected
    assert reward.run_options() == {
        "model": str(tmp_path), "separator": "\n\n", "label": 1, "tokenizer": str(tmp_path), "step_token": None
    }  # fmt: skip
    step_classifier(kind="SequenceClassification").save_pretrained(tmp_path)
    with pytest.raises(RewardConfigurationError, match=r"is not a checkpoint of a \.\.\.ForTokenClassification"):
        ProcessRewardModel(str(tmp_path)).set_up()


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (step_classifier, {"max_tokens_per_pass": 0}, "max_tokens_per_pass is 0"),
        (step_classifier, {"tokenizer": None}, "tokenizer is None and model is not a name or folder"),
        (step_classifier, {"label": 2}, "label is 2, and Qwen2ForTokenClassification has 2 labels"),
        (step_classifier, {"step_token": "two tokens"}, "step_token 'two tokens' is"),
        (lambda: step_classifier(kind="CausalLM"), {}, "no single linear layer .*Qwen2ForTokenClassification"),
    ],
)
def test_what_cannot_score_steps_is_found_at_setup(make, options, message):
    with pytest.raises(ValueError, match=message):
        ProcessRewardModel(make(), **{"tokenizer": TOKENIZER} | options).set_up()


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (Rollout(encode("4\n\n"), text="five"), r"as '4\\n\\n', and the policy's as 'five'"),
        (Rollout([5], text="5", messages=[{"role": "assistant", "content": "5"}]), "scores completions of one turn"),
    ],
)
def test_other_tokens_than_the_policys_and_episodes_are_refused(rollout, message):
    with pytest.raises(RewardConfigurationError, match=message):
        ProcessRewardModel(step_classifier(), tokenizer=TOKENIZER).score_groups([RolloutGroup([1], [rollout])])
