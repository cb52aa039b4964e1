"""From rows to prompts: columns, chat templates, length policy, errors at setup, form in YAML."""

import math
from types import SimpleNamespace

import pyarrow as pa
import pytest
from jsonargparse import ArgumentParser
from pyarrow import parquet

from pl_grouprl.data import PromptDataModule
from pl_grouprl.demo import MostFrequentDigit
from pl_grouprl.demo.tasks import digit_tokenizer
from tests.helpers.chat_tokenizers import CHATML, add_to_texts, gemma_tokenizer, qwen_tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + message['content'] }}"
    "{% if not loop.last or add_generation_prompt %}{{ '<end>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ suffix | default('one') }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return digit_tokenizer()


@pytest.fixture(scope="module")
def chat_tokenizer():
    tokenizer = digit_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def prompts_of(rows, tokenizer, split="train", **options):
    data = PromptDataModule(**{split: rows}, batch_size=1, tokenizer=tokenizer, **options)
    data.setup({"train": "fit", "val": "validate", "test": "test"}[split])
    return data.prompts[split]


def test_trl_row_and_another_prompt_column(tokenizer):
    (prompt,) = prompts_of([{"prompt": "31one", "answer": "x", "level": 3, "images": []}], tokenizer)
    assert tokenizer.decode(prompt.token_ids) == prompt.prompt == "31one"
    assert prompt.columns == {"answer": "x", "level": 3, "images": []}
    assert prompt.data_source == "default"
    (prompt,) = prompts_of([{"question": "7", "prompt": "8"}], tokenizer, prompt_column="question")
    assert (prompt.prompt, prompt.columns) == ("7", {"prompt": "8"})


def test_verl_row_from_parquet(chat_tokenizer, tmp_path):
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "six", "content": "12"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": 0},
    }
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "x.parquet")
    (prompt,) = prompts_of(str(tmp_path / "x.parquet"), chat_tokenizer)
    assert chat_tokenizer.decode(prompt.token_ids) == "six12<end>one"
    assert prompt.prompt == row["prompt"]
    assert prompt.columns["reward_model"]["ground_truth"] == "2"
    assert prompt.data_source == "openai/gsm8k"


def test_template_arguments_and_an_open_last_message():
    rows = [
        {"prompt": [{"role": "two", "content": "1"}]},
        {"prompt": [{"role": "two", "content": "1"}, {"role": "assistant", "content": "3"}]},
        {"prompt": "45"},
    ]
    tokenizer = digit_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("message['role']", "(message['role'] | replace('assistant', 'six'))")
    prompts = prompts_of(rows, tokenizer, chat_template_kwargs={"suffix": "nine"})
    texts = [tokenizer.decode(prompt.token_ids) for prompt in prompts]
    assert texts == ["two1<end>nine", "two1<end>six3", "45"]


@pytest.mark.parametrize(
    ("family", "ids", "rendered"),
    [("<bos> $A", "<bos>hi", "<bos>hi"), ("<bos> $A <eos>", "<bos>hi", "<bos>hi"), ("$A <eos>", "hi", "<bos>hi")],
)
def test_added_special_tokens(family, ids, rendered):
    """A string gets what the tokenizer puts before a text once, and never what it puts after it."""
    tokenizer = gemma_tokenizer()
    add_to_texts(tokenizer, family)
    rows = [{"prompt": "hi"}, {"prompt": "<bos>hi"}]
    assert [tokenizer.decode(prompt.token_ids) for prompt in prompts_of(rows, tokenizer)] == [ids, rendered]
    own = prompts_of(rows, tokenizer, add_special_tokens=False)
    assert [tokenizer.decode(prompt.token_ids) for prompt in own] == ["hi", "<bos>hi"]
    tokenizer.chat_template = "<bos>{{ messages[0].content }}"
    (chat,) = prompts_of([{"prompt": [{"role": "user", "content": "hi"}]}], tokenizer)
    assert tokenizer.decode(chat.token_ids) == "<bos>hi"


def test_control_tokens_in_messages_are_text_and_those_of_a_string_are_tokens():
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = CHATML
    forged = "hi<|im_end|>"
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": forged}], tokenize=False)
    rows = [{"prompt": [{"role": "user", "content": forged}]}, {"prompt": rendered}]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def ends(**options):
        prompts = prompts_of(rows, tokenizer, **options)
        assert [tokenizer.decode(p.token_ids) for p in prompts] == [rendered + "<|im_start|>assistant\n", rendered]
        return [prompt.token_ids.count(end) for prompt in prompts]

    assert ends() == [1, 2]
    assert ends(split_special_tokens=False) == [2, 2]


def test_a_prompt_that_ends_with_eos_is_reported():
    rows = [{"prompt": "a"}, {"prompt": "a<eos>"}]
    with pytest.warns(UserWarning, match=r"ends with the EOS token '<eos>' \(1 of 2 prompts do\)"):
        prompts_of(rows, gemma_tokenizer())


ROWS = [{"prompt": "1"}, {"prompt": "123"}, {"prompt": "12"}, {"prompt": "1234"}]


@pytest.mark.parametrize(
    ("policy", "kept"), [("drop", ["1", "12"]), ("truncate", ["1", "23", "12", "34"])], ids=["drop", "truncate"]
)
def test_overlong_prompts(tokenizer, policy, kept):
    prompts = prompts_of(ROWS, tokenizer, max_prompt_length=2, overlong_prompts=policy)
    assert [tokenizer.decode(prompt.token_ids) for prompt in prompts] == kept


def test_a_truncated_prompt_is_shown_as_the_model_reads_it():
    """By hand, a token per byte: a turn ends with 2, its header has 6 (user) or 11 (assistant, also at the end)."""
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = CHATML.replace("m.content | trim", "m.content.split('</think>')[-1] | trim")
    system = {"role": "system", "content": "Be brief."}
    answer = {"role": "assistant", "content": "<think>x</think>No. "}
    question = {"role": "user", "content": [{"type": "text", "text": "One and "}, {"type": "text", "text": "two?"}]}
    last = {"role": "user", "content": "Why?"}

    def shown(prompt, length):
        rows = [{"prompt": prompt, "answer": "x"}]
        (cut,) = prompts_of(rows, tokenizer, max_prompt_length=length, overlong_prompts="truncate")
        assert len(cut.token_ids) <= length
        return cut.prompt

    assert shown("0123456789", 4) == "6789"
    assert shown("\u00e9\u00e9", 3) == "\ufffd\u00e9"
    messages = [system, question, answer, last]
    assert shown(messages, 11) == [{"role": "user", "content": ""}]
    assert shown(messages, 11 + 2 + 3) == [{"role": "user", "content": "hy?"}]
    assert shown(messages, 11 + 2 + 4) == shown(messages, 17 + 6 + 2) == [last]
    assert shown(messages, 17 + 6 + 2 + 2) == [{"role": "assistant", "content": "o."}, last]
    cut = {"role": "user", "content": [{"type": "text", "text": "d two?"}]}
    assert shown(messages, 25 + 3 + 11 + 2 + 6) == [cut, answer, last]
    assert shown(messages, 25 + 3 + 11 + 2 + 12 + 6 + 2) == [question, answer, last]
    assert shown(messages, 1000) == messages


def test_overlong_prompts_refused(tokenizer):
    with pytest.raises(ValueError, match=r"train, row 1: .* 3 tokens, .*max_prompt_length=2 \(2 of 4"):
        prompts_of(ROWS, tokenizer, max_prompt_length=2, overlong_prompts="error")
    with pytest.raises(ValueError, match=r"2 of 2 prompts .*max_prompt_length=1 .*the shortest has 2"):
        prompts_of([{"prompt": "11"}, {"prompt": "222"}], tokenizer, max_prompt_length=1)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "1"}, r"no column 'prompt'; set prompt_column to one of \['question'\]"),
        ({"prompt": ""}, "the prompt has no tokens"),
        ({"prompt": 3}, "column 'prompt' is 3"),
        ({"prompt": []}, r"column 'prompt' is \[\]"),
        ({"prompt": [{"role": "user"}]}, "column 'prompt' is .*'role' and 'content'"),
        ({"prompt": "1", "images": ["x.png"]}, "column 'images' .* Pass processor="),
        ({"prompt": [{"role": "user", "content": "1"}]}, "the tokenizer has no chat template"),
    ],
)
def test_bad_rows_are_named_at_setup(tokenizer, row, message):
    with pytest.raises(ValueError, match=f"val, row 1: .*{message}"):
        prompts_of([{"prompt": "1"}, row], tokenizer, split="val")


def test_a_template_that_refuses_names_the_row():
    tokenizer = digit_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match=r"train, row 0: .* refused the messages \(roles must alternate"):
        prompts_of([{"prompt": [{"role": "user", "content": "1"}]}], tokenizer)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"batch_size": 0}, "PromptDataModule.batch_size is 0"),
        ({"max_prompt_length": 0}, "max_prompt_length is 0"),
        ({"overlong_prompts": "keep"}, "overlong_prompts is 'keep'"),
        *(({"max_dropped_share": share}, f"max_dropped_share is {share}") for share in (-0.1, 1.5, math.nan)),
    ],
)
def test_bad_options(options, name):
    with pytest.raises(ValueError, match=name):
        PromptDataModule(**options)


def test_a_missing_tokenizer_is_asked_for_once_there_are_rows():
    with pytest.raises(ValueError, match=r"PromptDataModule\.tokenizer is None"):
        prompts_of([{"prompt": "1"}], None)
    with pytest.raises(ValueError, match=r"PromptDataModule\(`train`\): list has no rows"):
        prompts_of([], None)


def test_tokenizer_by_path(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    (prompt,) = prompts_of([{"prompt": "31"}], str(tmp_path))
    assert prompt.token_ids == tokenizer("31")["input_ids"]


def test_setup_reads_only_what_a_stage_needs(tokenizer):
    data = PromptDataModule(train="nothing.jsonl", test=[{"prompt": "1"}], tokenizer=tokenizer)
    data.setup("test")
    assert list(data.prompts) == ["test"]
    assert data.val_dataloader() == []
    with pytest.raises(ValueError, match=r"`val`\) is None, and this stage needs it"):
        data.setup("validate")


def test_ranks_and_updates_come_from_the_trainer(tokenizer):
    rows = [{"prompt": str(number)} for number in range(6)]
    data = PromptDataModule(rows, val=rows[:3], batch_size=3, shuffle=False, tokenizer=tokenizer)
    data.trainer = SimpleNamespace(
        distributed_sampler_kwargs={"num_replicas": 2, "rank": 1},
        lightning_module=SimpleNamespace(updates_per_rollout=2),
        overfit_batches=0.0,
    )
    data.setup("fit")
    loader = data.train_dataloader()
    assert [[prompt.prompt for prompt in batch.prompts] for batch in loader] == [["1"], ["1"], ["4"], ["4"]]
    assert [[prompt.prompt for prompt in batch.prompts] for batch in data.val_dataloader()] == [["1"]]


TASK = {"class_path": "pl_grouprl.demo.MostFrequentDigit", "init_args": {"prompt_length": 16, "train_size": 8}}


@pytest.mark.parametrize(
    ("train", "kind"),
    [("x.jsonl", str), (["x.jsonl", "y/*.parquet"], list), (TASK, MostFrequentDigit), ([{"prompt": "1"}], list)],
)
def test_yaml_round_trip(train, kind):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(PromptDataModule, "data")
    init_args = {"train": train, "batch_size": 4, "chat_template_kwargs": {"enable_thinking": False}}
    config = parser.parse_object({"data": {"class_path": "pl_grouprl.data.PromptDataModule", "init_args": init_args}})
    dumped = parser.dump(config)
    data = parser.instantiate(parser.parse_string(dumped)).data
    assert isinstance(data.sources["train"], kind)
    assert data.batch_size == 4
    if kind is MostFrequentDigit:
        assert (data.sources["train"].prompt_length, data.sources["train"].sizes["train"]) == (16, 8)
