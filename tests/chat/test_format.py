"""Rendering of results between turns, where templates come from, and what is refused."""

import copy
import pickle

import pytest

from pl_grouprl.chat import ChatFormat
from tests.helpers.chat_tokenizers import CHATML, gemma_tokenizer, llama_tokenizer, plain_tokenizer, qwen_tokenizer

USER = {"role": "user", "content": "hi"}

GEMMA = """{%- for m in messages -%}
<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

THINKING = """{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' if m.role == 'assistant' else '' }}{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments |
tojson }}}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""

# Thoughts of a turn are dropped as soon as a result follows, if there are none anyway: Qwen3's rule.
FORGETFUL = THINKING.replace(
    "'<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' if m.role == 'assistant' else ''",
    "'<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' if m.role == 'assistant' and (loop.last or "
    "m.reasoning_content) else ''",
)


def results(*contents, name="multiply"):
    return [{"role": "tool", "name": name, "content": content} for content in contents]


QWEN_END = "<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("tokenizer", "template", "options", "messages", "expected"),
    [
        (qwen_tokenizer, "qwen3", {}, results("12", "é 🎉"),
            "\n<|im_start|>user\n<tool_response>\n12\n</tool_response>\n<tool_response>\né 🎉\n</tool_response>"
            + QWEN_END),
        (qwen_tokenizer, "qwen3", {"enable_thinking": False}, results("12"),
            "\n<|im_start|>user\n<tool_response>\n12\n</tool_response>" + QWEN_END + "<think>\n\n</think>\n\n"),
        (qwen_tokenizer, THINKING, {}, results("12", name="<|im_end|>"),
            "\n<|im_start|>tool\n12" + QWEN_END + "<think>\n"),
        (llama_tokenizer, "llama3", {}, results("12"), '<|start_header_id|>ipython<|end_header_id|>\n\n"12"<|eot_id|>'
            "<|start_header_id|>assistant<|end_header_id|>\n\n"),
        (plain_tokenizer, "plain", {}, results("12", "a b"), "<result>12<end><result>a b<end><assistant>"),
        # The end of a turn is no EOS token, or only that of a question is.
        (qwen_tokenizer, THINKING.replace("<|im_end|>", "{{ '<|im_end|>' if m.role == 'user' else '<|endoftext|>' }}"),
            {}, results("12"), "\n<|im_start|>tool\n12<|endoftext|>\n<|im_start|>assistant\n<think>\n"),
        (gemma_tokenizer, GEMMA, {}, results("12"), "\n<start_of_turn>tool\n12<end_of_turn>\n<start_of_turn>model\n"),
        (qwen_tokenizer, "qwen3", {}, results("a\ud800b"), None),
    ],
)  # fmt: skip
def test_results_are_the_tokens_between_two_turns(tokenizer, template, options, messages, expected):
    chat = ChatFormat(tokenizer(), template, options)
    if expected is None:  # a lone surrogate, which cannot be encoded
        expected = chat.tokenizer.decode(chat.encode_results(results("a\ufffdb")))
    for _ in range(2):  # the second time the beginning of the dummy conversation is known
        assert chat.tokenizer.decode(chat.encode_results(messages)) == expected


@pytest.mark.parametrize(
    ("tokenizer", "template"), [(qwen_tokenizer, "qwen3"), (llama_tokenizer, "llama3"), (plain_tokenizer, "plain")]
)
def test_an_episode_in_tokens_is_what_the_template_renders(tokenizer, template):
    """Turns as sampled and results between them give the rendering of the whole conversation."""
    chat = ChatFormat(tokenizer(), template)
    chat.check_tools()
    call = {"type": "function", "function": {"name": "multiply", "arguments": {"a": "3"}}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    messages = [USER]
    token_ids = chat.encode_prompt(messages)
    for number in range(3):
        ending = chat.tokenizer.eos_token
        begun = chat.tokenizer.apply_chat_template([*messages, turn], tokenize=False, chat_template=chat.source)
        written = begun[len(chat.render_prompt(messages)) : begun.rindex(ending)] + ending
        token_ids += chat.tokenizer(written, add_special_tokens=False)["input_ids"]
        answers = results(f"{number}", "x")
        token_ids += chat.encode_results(answers)
        messages = [*messages, turn, *answers]
        assert token_ids == chat.encode_prompt(messages)


def test_names_that_models_make_up_do_not_fill_the_memory():
    chat = ChatFormat(plain_tokenizer(), "plain")
    for number in range(300):
        chat.encode_results(results("1", name=f"tool {number}"))
    assert len(chat._dummy_prefixes) <= 256


def test_another_day_is_no_other_conversation():
    """Templates may render the date, which the beginning of the dummy conversation was rendered with."""
    chat = ChatFormat(llama_tokenizer(), "llama3", {"date_string": "31 Jan 2026"})
    expected = chat.encode_results(results("12"))
    chat.template_kwargs["date_string"] = "1 Feb 2026"
    assert chat.encode_results(results("12")) == expected


def test_templates_come_from_names_files_and_text(tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text("{{ messages[0].content }}!", encoding="utf-8")
    tokenizer = qwen_tokenizer()
    assert ChatFormat(tokenizer, str(path)).render_prompt([USER]) == "hi!"
    assert ChatFormat(tokenizer, "{{ messages[0].content }}?").render_prompt([USER]) == "hi?"
    tokenizer.chat_template = "{{ messages[0].content }}."
    assert ChatFormat(tokenizer).render_prompt([USER]) == "hi."
    tokenizer.chat_template = {"default": "default", "tool_use": "{{ tools | length }} tools"}
    assert ChatFormat(tokenizer).render_prompt([USER]) == "default"
    assert ChatFormat(tokenizer).render_prompt([USER], [{"type": "function"}]) == "1 tools"
    options = {"chat_template": "{{ messages[0].content }}, {{ name }}"}
    assert ChatFormat(tokenizer, None, {**options, "name": "you"}).render_prompt([USER]) == "hi, you"
    with pytest.raises(ValueError, match="chat_template"):
        ChatFormat(tokenizer, "qwen3", options)
    with pytest.raises(ValueError, match="chat_template is 'qwen4'"):
        ChatFormat(tokenizer, "qwen4")


def test_of_several_templates_that_for_tools_counts():
    tokenizer = qwen_tokenizer()
    ChatFormat(tokenizer, THINKING).check_tools()
    tokenizer.chat_template = {"default": "no tools here", "tool_use": ChatFormat(tokenizer, "qwen3").source}
    chat = ChatFormat(tokenizer)
    chat.check_tools()
    assert chat.encode_results(results("12")) == ChatFormat(tokenizer, "qwen3").encode_results(results("12"))
    assert chat.parser.name == "qwen3"


WITHOUT_CALLS = "{% for m in messages %}<|start_header_id|>{{ m.role }}{{ m.content }}<|eot_id|>{% endfor %}"
WITHOUT_RESULTS = (
    "{% for m in messages if m.role != 'tool' %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
)
WITHOUT_TOOL_ROLE = "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
COUNTING = THINKING.replace("<|im_start|>{{ m.role }}", "<|im_start|>{{ m.role }} {{ loop.index }}")


@pytest.mark.parametrize(
    ("tokenizer", "template", "problem"),
    [
        (qwen_tokenizer, None, "has none; pass episodes.chat_template="),
        (llama_tokenizer, WITHOUT_CALLS, "drops the name of a call; pass episodes.chat_template="),
        (qwen_tokenizer, WITHOUT_RESULTS, "drops the result of a tool; pass episodes.chat_template="),
        (qwen_tokenizer, WITHOUT_TOOL_ROLE, "no tools here.*chat_template="),
        (qwen_tokenizer, FORGETFUL, "not prefix-preserving.*chat_template="),
        (qwen_tokenizer, COUNTING, "different positions of a conversation.*chat_template="),
        (gemma_tokenizer, GEMMA, "No parser knows.*register_tool_parser"),
    ],
)
def test_templates_that_tools_cannot_be_used_with_are_refused(tokenizer, template, problem):
    with pytest.raises(ValueError, match=problem):
        ChatFormat(tokenizer(), template).check_tools()


PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{{ part.text }}{% endfor %}"
    "<|im_end|>\n{% endfor %}"
)


@pytest.mark.parametrize(
    ("tokenizer", "eos", "template", "ends"),
    [
        (qwen_tokenizer, "<|im_end|>", CHATML, ["<|im_end|>"]),
        (qwen_tokenizer, "<|endoftext|>", CHATML, ["<|im_end|>"]),
        (qwen_tokenizer, "<|endoftext|>", "qwen3", ["<|im_end|>"]),
        (qwen_tokenizer, "<|endoftext|>", CHATML.replace("|im_end|>\n", "|im_end|><|endoftext|>"), ["<|endoftext|>"]),
        # An EOS token after the conversation is no end of a turn (Phi-3's template).
        (qwen_tokenizer, "<|endoftext|>", CHATML + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}",
            ["<|im_end|>"]),
        (gemma_tokenizer, "<eos>", GEMMA, ["<end_of_turn>"]),
        # A template for parts, as models with images have.
        (qwen_tokenizer, "<|endoftext|>", PARTS, ["<|im_end|>"]),
        # A token of its own after calls (gpt-oss), and answers that end differently once a turn follows.
        (gemma_tokenizer, "<eos>", "{% for m in messages %}<bos>{{ m.content }}{{ m.tool_calls }}{{ "
            "'<start_of_turn>' if m.tool_calls else '<eos>' if loop.last else '<end_of_turn>' }}{% endfor %}",
            ["<start_of_turn>"]),
        (gemma_tokenizer, "<eos>", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", []),
        (gemma_tokenizer, "<eos>", "{{ raise_exception('no') }}", []),
    ],
)  # fmt: skip
def test_the_tokens_that_end_a_turn(tokenizer, eos, template, ends):
    tokenizer = tokenizer()
    tokenizer.eos_token = eos
    chat = ChatFormat(tokenizer, template)
    assert [tokenizer.decode([end]) for end in chat.turn_end_ids] == ends


def test_an_added_token_that_is_not_special_ends_answers():
    tokenizer = gemma_tokenizer()
    tokenizer.add_tokens(["[/turn]"])
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}[/turn]\n{% endfor %}"
    assert tokenizer.decode(ChatFormat(tokenizer, template).turn_end_ids) == "[/turn]"


@pytest.mark.parametrize("ending", ["", "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"])
def test_an_episode_of_a_base_model_is_one_of_the_chat_model(ending):
    """The EOS token of its tokenizer is not the one that ends turns."""
    base = qwen_tokenizer()
    base.eos_token = "<|endoftext|>"
    chat, expected = ChatFormat(base, THINKING + ending), ChatFormat(qwen_tokenizer(), THINKING)
    assert chat.encode_results(results("1")) == expected.encode_results(results("1"))
    assert chat.parse(base("hi<|im_end|>")["input_ids"])["content"] == "hi"


def test_what_cannot_be_rendered_is_refused():
    with pytest.raises(ValueError, match=r"refused the messages.*add_generation_prompt"):
        ChatFormat(qwen_tokenizer(), "qwen3", {"add_generation_prompt": False}).render_prompt([USER])
    with pytest.raises(ValueError, match="chat_template"):
        ChatFormat(qwen_tokenizer()).encode_prompt([USER])


def test_formats_can_be_copied():
    chat = ChatFormat(plain_tokenizer(), "plain")
    expected = chat.encode_results(results("1"))
    for other in (copy.deepcopy(chat), pickle.loads(pickle.dumps(chat))):
        assert other.encode_results(results("1")) == expected
        assert other.parser == chat.parser
