"""A chat template that drops the thinking of earlier turns: what the model reads then begins a row of its own."""

import pytest
import torch
from helpers.chance_episodes import double
from helpers.qwen_tokenizer import qwen_tokenizer
from helpers.sampled_episodes import mask_of, open_episodes
from helpers.scripted_engine import ScriptedEngine
from helpers.tiny_models import tiny_model

from pl_grouprl.chat import ChatFormat
from pl_grouprl.chat.format import read_template
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.types import Rollout, SamplingConfig

THINKING = read_template("qwen3")
FORGETFUL = THINKING.replace(
    "{%- set thought = message.reasoning_content -%}",
    "{%- set thought = message.reasoning_content if message == messages[-1] else '' -%}",
)
"""Renders the thinking of a turn only while nothing follows: harsher than Qwen3's own rule, below."""

BLOCK = r"{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + written.lstrip('\n') -}}"
SHOWN = "place > question.place and (thought or place == messages | length - 1)"
QUESTION = (
    "{%- set question = namespace(place=messages | length) -%}{%- for message in messages -%}"
    "{%- if message.role == 'user' -%}{%- set question.place = loop.index0 -%}{%- endif -%}{%- endfor -%}"
)
QWEN3 = QUESTION + (
    THINKING.replace("macro model_text(message)", "macro model_text(message, place)")
    .replace("model_text(message) +", "model_text(message, loop.index0 + (1 if opening else 0)) +")
    .replace(BLOCK, f"{{%- if {SHOWN} -%}}{BLOCK}{{%- else -%}}{{{{- written -}}}}{{%- endif -%}}")
)
"""Qwen3's own rule: thinking before the last question is dropped, and empty thinking of all turns but the last."""

CALL = '<tool_call>\n{"name": "double", "arguments": {"number": 4}}\n</tool_call>'
THOUGHT, NOTHING = "<think>\nFour.\n</think>\n\n", "<think>\n\n</think>\n\n"
TURNS = {
    0: [f"{THOUGHT}{CALL}", f"{THOUGHT}{CALL}", f"{THOUGHT}It is 8."],
    1: [f"{NOTHING}{CALL}", f"{NOTHING}It is 8."],
    2: ["It is 9."],
}


def by_turns(prompt_ids, index, turn):
    return TURNS[index][turn]


ROWS = [{"prompt": [{"role": "user", "content": "Twice 4?"}]}]


@pytest.fixture(scope="module")
def tokenizer():
    return qwen_tokenizer()


@pytest.fixture(scope="module")
def policy(tokenizer):
    return tiny_model("qwen3", vocab_size=len(tokenizer), max_position_embeddings=2048)


def sample(policy, tokenizer, template=FORGETFUL, engine=None, count=3, rows=ROWS, most=1000, **options):
    options = {"rewritten_history": "new_row", "tools": [double], "chat_template": template} | options
    with open_episodes(policy, tokenizer, engine or ScriptedEngine(by_turns), **options) as run:
        (group,) = run(rows, SamplingConfig(max_new_tokens=most), count)
    return group


class Restarting(ScriptedEngine):
    """Turn by turn: a rewritten prompt continues its episode, which a scripted engine cannot know."""

    def generate(self, prompts, sampling, *, prompt_indices=None, max_new_tokens=None, **options):
        self.calls = getattr(self, "calls", -1) + 1
        groups, count = [], options["num_generations"]
        limits = max_new_tokens or [sampling.max_new_tokens] * len(prompts)
        for prompt, index, limit in zip(prompts, prompt_indices, limits, strict=True):
            numbers = [index * count + number for number in range(count)]
            self.turns.setdefault(index, []).append(prompt)
            groups.append([self.answer(self.script(prompt, number, self.calls), limit) for number in numbers])
        return groups

    def answer(self, text, limit):
        ids = self.tokenizer(text + "<|im_end|>", add_special_tokens=False)["input_ids"]
        reason = "stop" if len(ids) <= limit else "length"
        ids = ids[:limit]
        return Rollout(ids, [-0.1 * (1 + place) for place in range(len(ids))], finish_reason=reason)


def test_the_rewritten_history_begins_a_row(policy, tokenizer):
    engine = Restarting(by_turns)
    group = sample(policy, tokenizer, engine=engine)
    assert [len(episode.rows) for episode in group.episodes] == [3, 1, 1]
    assert [row.episode for row in group.rollouts] == [0, 0, 0, None, None]
    rows = group.episodes[0].rows
    texts = [tokenizer.decode(row.token_ids) for row in rows]
    result = "<|im_end|>\n<|im_start|>user\n<tool_response>\n8 \n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    forgotten = f"{NOTHING}{CALL}{result}"
    assert texts == [
        f"{THOUGHT}{CALL}<|im_end|>",
        f"{forgotten}{THOUGHT}{CALL}<|im_end|>",
        f"{forgotten}{forgotten}{THOUGHT}It is 8.<|im_end|>",
    ]
    for row, written in zip(rows, TURNS[0], strict=True):
        sampled = [token for token, own in zip(row.token_ids, mask_of(row), strict=True) if own]
        assert tokenizer.decode(sampled) == f"{written}<|im_end|>"
        place = mask_of(row).index(1)
        assert row.logprobs[:place] == [0.0] * place
        assert row.logprobs[place:] == pytest.approx([-0.1 * (1 + number) for number in range(len(sampled))])
    assert [len(row.messages) for row in rows] == [1, 3, 5]
    assert [row.finish_reason for row in rows] == ["stop"] * 3
    assert [row.tool_counts.get("calls", 0) for row in rows] == [0, 0, 2]  # the last row is the episode
    assert group.episodes[0].last.num_turns == 3
    assert group.episodes[0].last.text.endswith("It is 8.")
    # What each row was sampled from is what it is trained on.
    contexts = [group.prompt_ids + row.token_ids[: mask_of(row).index(1)] for row in rows]
    assert contexts == [engine.turns[0][0], *engine.turns[0][1:]]


def test_qwen3_s_own_template_drops_only_empty_thinking_between_tools(policy, tokenizer):
    """What was thought since the question stays."""
    engine = Restarting(by_turns)
    group = sample(policy, tokenizer, QWEN3, engine=engine)
    assert [len(episode.rows) for episode in group.episodes] == [1, 2, 1]
    first, second = (tokenizer.decode(row.token_ids) for row in group.episodes[1].rows)
    assert first == f"{NOTHING}{CALL}<|im_end|>"
    assert second.startswith(f"{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n8 ")
    assert second.endswith(f"<|im_start|>assistant\n{NOTHING}It is 8.<|im_end|>")


def test_a_block_that_the_prompt_opens_is_dropped_later(policy, tokenizer):
    """With `enable_thinking` off, Qwen3's own template ends prompts in an empty block."""
    engine = Restarting(lambda prompt_ids, index, turn: (CALL, CALL, "It is 8.")[turn])
    group = sample(policy, tokenizer, QWEN3, engine, 1, template_kwargs={"enable_thinking": False})
    contexts = [group.prompt_ids + row.token_ids[: row.loss_mask.index(1)] for row in group.rollouts]
    assert contexts == engine.turns[0]
    assert [tokenizer.decode(ids).count(NOTHING) for ids in contexts] == [1, 1, 1]
    assert all(tokenizer.decode(ids).endswith(f"<|im_start|>assistant\n{NOTHING}") for ids in contexts)


def test_a_history_that_stays_as_it_is_continues_its_row(policy, tokenizer):
    kept = sample(policy, tokenizer, THINKING)
    refused = sample(policy, tokenizer, THINKING, rewritten_history="refuse")
    for row in (*kept.rollouts, *refused.rollouts):
        row.tool_counts.pop("seconds")
    assert kept == refused
    assert [row.episode for row in kept.rollouts] == [None] * 3


def test_limits_count_the_whole_episode(policy, tokenizer):
    lengths = [len(tokenizer(text + "<|im_end|>", add_special_tokens=False)["input_ids"]) for text in TURNS[0]]
    rows = sample(policy, tokenizer, engine=Restarting(by_turns), most=lengths[0] + lengths[1] + 2).episodes[0].rows
    assert [sum(mask_of(row)) for row in rows] == [lengths[0], lengths[1], 2]
    assert rows[-1].finish_reason == "length"


def test_a_model_samples_rows_that_it_can_score(policy, tokenizer):
    """With kept caches, log-probabilities are those of a fresh forward over each row."""

    def script(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    forced = {index: [script(f"{turn}<|im_end|>") for turn in turns] for index, turns in TURNS.items()}

    class Forced(HFRolloutEngine):
        """Samples with the model, then takes the scripted tokens with the model's log-probabilities of the prompt."""

        def generate(self, prompts, sampling, **options):
            self.count = getattr(self, "count", -1) + 1
            groups = super().generate(prompts, sampling, **options)
            if self.count == 0:
                for number, rollout in enumerate(groups[0]):
                    rollout.token_ids, rollout.finish_reason = list(forced[number][0]), "stop"
                    rollout.logprobs = [0.0] * len(rollout.token_ids)
            return groups

    group = sample(policy, tokenizer, engine=Forced(), max_turn_tokens=100)
    later = [row for episode in group.episodes for row in episode.rows[1:]]
    assert later
    for row in later:
        ids, mask = torch.tensor([group.prompt_ids + row.token_ids]), mask_of(row)
        with torch.no_grad():
            logprobs = policy(ids).logits[0].log_softmax(-1)
        start = len(group.prompt_ids)
        expected = [float(logprobs[start + t - 1, row.token_ids[t]]) for t in range(len(mask)) if mask[t]]
        found = [value for value, own in zip(row.logprobs, mask, strict=True) if own]
        assert found == pytest.approx(expected, abs=1e-4)


def test_what_is_refused(policy, tokenizer):
    for options, message in (
        ({"rewritten_history": "refuse"}, r"prefix-preserving.*or set episodes.rewritten_history='new_row'"),
        ({"rewritten_history": "rows"}, "episodes.rewritten_history is 'rows'"),
        ({"template": FORGETFUL.replace("+ text_of(message.content) +", "+ '' +")}, "drops the result of a tool"),
        ({"tools": []}, "episodes.rewritten_history is 'new_row'"),
    ):
        with pytest.raises(ValueError, match=message):
            sample(policy, tokenizer, **options)
    rows = [{"prompt": [{"role": "user", "content": "Twice 4?"}, {"role": "assistant", "content": "It is"}]}]
    with pytest.raises(ValueError, match=r"row 0 ends in a message that the model continues"):
        sample(policy, tokenizer, engine=Restarting(by_turns), rows=rows)


def test_what_is_kept_as_sampled(tokenizer):
    """Tokens are kept even where the tokenizer would have written the same text with others."""
    chat = ChatFormat(tokenizer, THINKING)
    messages = [{"role": "user", "content": "the user"}]
    ids = [token for letter in chat.render_prompt(messages) for token in tokenizer(letter)["input_ids"]]
    answer = {"role": "assistant", "content": "a", "reasoning_content": "b"}
    longer = [*messages, answer, {"role": "tool", "name": "f", "content": "8"}]
    found = chat.encode_history(ids, longer)
    assert found[: len(ids)] == ids != chat.encode_prompt(messages)
    assert tokenizer.decode(found) == chat.render_prompt(longer)
