"""The built-in chat templates, against conversations written out by hand."""

import json

import pytest

from pl_grouprl.chat import ChatFormat
from tests.helpers.chat_tokenizers import llama_tokenizer, plain_tokenizer, qwen_tokenizer

MULTIPLY = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": 'Multiplies "naïve" <numbers>.',
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def result(content, name="multiply"):
    return {"role": "tool", "name": name, "content": content}


USER = {"role": "user", "content": "What is 3 * 4?"}
SYSTEM = {"role": "system", "content": "Be brief."}

QWEN_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{"type": "function", "function": {"name": "multiply", "description": "Multiplies \\"naïve\\" <numbers>.", \
"parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""

ASKED, ANSWER = "<|im_start|>user\nWhat is 3 * 4?<|im_end|>\n", "<|im_start|>assistant\n"
HISTORY = [  # two calls in a turn with thoughts and text, then one without either, then an answer that is continued
    USER,
    {
        "role": "assistant",
        "reasoning_content": "\nBoth ways.\n",
        "content": "I will check.",
        "tool_calls": [call("multiply", a=3, b="four 🎉"), call("ping")],
    },
    result("12"),
    result("", "ping"),
    {"role": "assistant", "content": "", "tool_calls": [call("multiply", a=[1, None])]},
    result("{'error': 'no <list>'}"),
    {"role": "assistant", "content": "<think>\nSo 12.\n</think>\n\nIt is"},
]
QWEN = [
    ([USER], (), {}, ASKED + ANSWER),
    ([USER], (), {"enable_thinking": False}, ASKED + ANSWER + "<think>\n\n</think>\n\n"),
    ([SYSTEM, USER], (), {}, f"<|im_start|>system\nBe brief.<|im_end|>\n{ASKED}{ANSWER}"),
    ([USER], [MULTIPLY], {}, f"<|im_start|>system\n{QWEN_TOOLS}<|im_end|>\n{ASKED}{ANSWER}"),
    ([SYSTEM, USER], [MULTIPLY], {}, f"<|im_start|>system\nBe brief.\n\n{QWEN_TOOLS}<|im_end|>\n{ASKED}{ANSWER}"),
    (
        HISTORY,
        (),
        {},
        f"{ASKED}{ANSWER}<think>\nBoth ways.\n</think>\n\nI will check.\n"
        '<tool_call>\n{"name": "multiply", "arguments": {"a": 3, "b": "four 🎉"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n12\n</tool_response>\n<tool_response>\n\n</tool_response><|im_end|>\n"
        f"{ANSWER}<think>\n\n</think>\n\n"
        '<tool_call>\n{"name": "multiply", "arguments": {"a": [1, null]}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n{'error': 'no <list>'}\n</tool_response><|im_end|>\n"
        f"{ANSWER}<think>\nSo 12.\n</think>\n\nIt is",
    ),
    (  # turns before another question keep their thoughts
        [USER, {"role": "assistant", "reasoning_content": "Easy.", "content": "12"}, USER],
        (),
        {},
        f"{ASKED}{ANSWER}<think>\nEasy.\n</think>\n\n12<|im_end|>\n{ASKED}{ANSWER}",
    ),
]

LLAMA_SYSTEM = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n{}"
    "Cutting Knowledge Date: December 2023\nToday Date: {}\n\n{}<|eot_id|>"
)
LLAMA_USER = "<|start_header_id|>user<|end_header_id|>\n\n"
LLAMA_MODEL = "<|start_header_id|>assistant<|end_header_id|>\n\n"
LLAMA_RESULT = "<|start_header_id|>ipython<|end_header_id|>\n\n"
LLAMA_FORMAT = (
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    f"Do not use variables.\n\n{json.dumps(MULTIPLY, indent=4, ensure_ascii=False)}\n\n"
)
LLAMA_TOOLS = (
    "Given the following functions, please respond with a JSON for a function call with its proper arguments that best "
    f"answers the given prompt.\n\n{LLAMA_FORMAT}"
)
LLAMA_SYSTEM_TOOLS = (
    "You have access to the following functions. To call a function, please respond with JSON for a function call."
    f"{LLAMA_FORMAT}"
)

LLAMA_ASKED = LLAMA_USER + "What is 3 * 4?<|eot_id|>"
LLAMA_TURNS = [
    {"role": "assistant", "content": "", "tool_calls": [call("multiply", a=3, b="four 🎉")]},
    result('twelve "12"'),
    {"role": "assistant", "content": "", "tool_calls": [call("ping")]},
    result("", "ping"),
    result("again", "ping"),
    {"role": "assistant", "content": "It is"},
]
LLAMA = [
    ([USER], (), {}, LLAMA_SYSTEM.format("", "26 Jul 2024", "") + LLAMA_ASKED + LLAMA_MODEL),
    (
        [{"role": "system", "content": " Be brief.\n"}, USER],
        (),
        {"date_string": "01 Feb 2026"},
        LLAMA_SYSTEM.format("", "01 Feb 2026", "Be brief.") + LLAMA_ASKED + LLAMA_MODEL,
    ),
    (
        [SYSTEM, USER],
        [MULTIPLY],
        {"tools_in_user_message": False},
        LLAMA_SYSTEM.format("Environment: ipython\n", "26 Jul 2024", LLAMA_SYSTEM_TOOLS + "Be brief.")
        + f"{LLAMA_ASKED}{LLAMA_MODEL}",
    ),
    (
        [SYSTEM, USER, *LLAMA_TURNS],
        [MULTIPLY],
        {},
        LLAMA_SYSTEM.format("Environment: ipython\n", "26 Jul 2024", "Be brief.")
        + f"{LLAMA_USER}{LLAMA_TOOLS}What is 3 * 4?<|eot_id|>{LLAMA_MODEL}"
        + '{"name": "multiply", "parameters": {"a": 3, "b": "four 🎉"}}<|eot_id|>'
        + f'{LLAMA_RESULT}"twelve \\"12\\""<|eot_id|>{LLAMA_MODEL}'
        + '{"name": "ping", "parameters": {}}<|eot_id|>'
        + f'{LLAMA_RESULT}""<|eot_id|>{LLAMA_RESULT}"again"<|eot_id|>{LLAMA_MODEL}It is',
    ),
]

PLAIN = [
    ([{"role": "user", "content": "key ab"}], [MULTIPLY], {}, "<user>key ab<end><assistant>"),
    (
        [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "key ab"},
            {"role": "assistant", "content": "", "tool_calls": [call("lookup", key="ab", times=2), call("ping")]},
            result("cd"),
            result("pong"),
            {"role": "assistant", "content": "answ"},
        ],
        (),
        {},
        "<system>be brief<end><user>key ab<end><assistant><call>lookup ab 2<call>ping<end>"
        "<result>cd<end><result>pong<end><assistant>answ",
    ),
]

CASES = [
    *(pytest.param("qwen3", qwen_tokenizer, *case) for case in QWEN),
    *(pytest.param("llama3", llama_tokenizer, *case) for case in LLAMA),
    *(pytest.param("plain", plain_tokenizer, *case) for case in PLAIN),
]


@pytest.mark.parametrize(("template", "tokenizer", "messages", "tools", "options", "expected"), CASES)
def test_a_prompt_reads_as_the_model_expects(template, tokenizer, messages, tools, options, expected):
    chat = ChatFormat(tokenizer(), template, options)
    assert chat.render_prompt(messages, tools) == expected
    assert chat.encode_prompt(messages, tools) == chat.tokenizer(expected, add_special_tokens=False)["input_ids"]


def test_llama_refuses_what_it_cannot_express():
    two_calls = {"role": "assistant", "content": "", "tool_calls": [call("a"), call("b")]}
    chat = ChatFormat(llama_tokenizer(), "llama3")
    with pytest.raises(ValueError, match=r"refused the messages .*one call per turn"):
        chat.render_prompt([USER, two_calls, result("1")])
    with pytest.raises(ValueError, match=r"refused the messages .*first message of the user"):
        chat.render_prompt([SYSTEM], [MULTIPLY])


def test_qwen3_places_images_in_results_and_questions_as_in_a_text():
    """As Qwen-VL's own templates write them."""
    place = "<|vision_start|><|image_pad|><|vision_end|>"
    texts = ChatFormat(qwen_tokenizer(), "qwen3", split_special_tokens=False)
    parts = [{"type": "text", "text": "See "}, {"type": "image"}, {"type": "text", "text": "."}]
    turn = {"role": "assistant", "content": "", "tool_calls": [call("ping")]}
    given = [{**SYSTEM, "content": parts}, {**USER, "content": parts}, turn, result(parts)]
    written = [{**message, "content": f"See {place}."} for message in given]
    written[2] = turn
    assert texts.render_prompt(given, [MULTIPLY]) == texts.render_prompt(written, [MULTIPLY])
    assert texts.render_prompt(given).count(place) == 3
