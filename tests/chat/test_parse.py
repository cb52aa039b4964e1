"""Turns of models as messages: calls, thoughts, malformed ones, and hostile ones."""

import contextlib
import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pl_grouprl.chat import ChatFormat, MalformedTurnError, ToolParser, register_tool_parser
from pl_grouprl.chat import parsing as families
from pl_grouprl.chat.parsing import MAX_NESTING
from tests.helpers.chat_tokenizers import llama_tokenizer, plain_tokenizer, qwen_tokenizer

TAGGED = """{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>
<function={{ c.function.name }}>
{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>
{{ v if v is string else v | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""

FORMATS = {
    "qwen": ChatFormat(qwen_tokenizer(), "qwen3"),
    "tagged": ChatFormat(qwen_tokenizer(), TAGGED),
    "nemotron": ChatFormat(qwen_tokenizer(), TAGGED + "{# truncate_history_thinking #}"),
    "llama": ChatFormat(llama_tokenizer(), "llama3"),
    "plain": ChatFormat(plain_tokenizer(), "plain"),
}
HEADERS = {
    "qwen": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "tagged": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "nemotron": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "llama": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "plain": "<user>hi<end><assistant>",
}


def parse(family, text, before="", tools=()):
    chat = FORMATS[family]
    encode = chat.tokenizer
    return chat.parse(encode(text)["input_ids"], encode(HEADERS[family] + before)["input_ids"], tools)


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def message(content="", *calls, thought=None):
    parsed = {"role": "assistant", "content": content}
    if calls:
        parsed["tool_calls"] = list(calls)
    return parsed if thought is None else {**parsed, "reasoning_content": thought}


QWEN_CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
CALL = call("multiply", {"a": 3, "b": 4})


@pytest.mark.parametrize(
    ("text", "before", "expected"),
    [
        ("It is 12.<|im_end|>", "", message("It is 12.")),
        ("It is 12.", "", message("It is 12.")),
        (f"{QWEN_CALL}<|im_end|>", "", message("", CALL)),
        (f"{QWEN_CALL}", "", message("", CALL)),
        (f" I check.\n{QWEN_CALL}<|im_end|>\n", "", message("I check.", CALL)),
        (f"{QWEN_CALL}\n{QWEN_CALL}<|im_end|>", "", message("", CALL, CALL)),
        ("<think>\nHm.\n</think>\n\nIt is 12.<|im_end|>", "", message("It is 12.", thought="Hm.")),
        ("<think>\n\n</think>\n\nIt is 12.<|im_end|>", "", message("It is 12.")),
        (f"<think>Hm.</think>Now.\n{QWEN_CALL}<|im_end|>", "", message("Now.", CALL, thought="Hm.")),
        ("Hm.\n</think>\n\nIt is 12.<|im_end|>", "<think>\n", message("It is 12.", thought="Hm.")),
        ("It is 12.<|im_end|>", "<think>\n\n</think>\n\n", message("It is 12.")),
        (" 12.<|im_end|>", "It is", message("It is 12.")),
        ("<think>\nHm, so", "", message("", thought="Hm, so")),
        (f"<think>\n{QWEN_CALL}", "", message("", thought=QWEN_CALL)),
        ('<tool_call>{"name": "ping"}</tool_call><|im_end|>', "", message("", call("ping", {}))),
        ('<tool_call>{"name": "ping", "arguments": null}</tool_call>', "", message("", call("ping", {}))),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "", message("", call("f", [1]))),
        ('<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "", message("", call("f", "x"))),
        (
            '<tool_call>{"name": "é 🎉", "arguments": {"é": "日"}}</tool_call>',
            "",
            message("", call("é 🎉", {"é": "日"})),
        ),
        (f"{QWEN_CALL}Done.<|im_end|>", "", message("Done.", CALL)),
        ("", "", message("")),
    ],
)
def test_qwen(text, before, expected):
    assert parse("qwen", text, before) == expected


BROKEN = [
    '<tool_call>\n{"name": "multiply", "arguments": {"a": 3, "b": 4}\n</tool_call>',
    '<tool_call>\n{"arguments": {"a": 3, "b": 4}}\n</tool_call>',
    '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>', '<tool_call>\n{"name": null}\n</tool_call>',
    '<tool_call>\n{"name": "multiply", "arguments": {a: 3}}\n</tool_call>',
    '<tool_call>\n["multiply", 3]\n</tool_call>', "<tool_call>\n</tool_call>",
    '<tool_call>\n{"name": "multiply", "argu', f"{QWEN_CALL}\n<tool_call>", QWEN_CALL.removesuffix("</tool_call>"),
    f"<think>Hm.</think>{QWEN_CALL}\n<tool_call>multiply(3)</tool_call>",
]  # fmt: skip


@pytest.mark.parametrize("text", BROKEN)
def test_a_turn_with_a_malformed_call_is_text(text):
    assert parse("qwen", text + "<|im_end|>") == message(text)


def test_a_turn_may_be_cut_anywhere():
    for place in range(1, 60):
        parsed = parse("qwen", f"{QWEN_CALL}<|im_end|>"[:place])
        assert parsed == message("", CALL) or "tool_calls" not in parsed


def described(name, **types):
    properties = {key: {"type": kind} for key, kind in types.items()}
    return {"function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


SEARCH = described("search", query="string", n="integer", filter="object")


@pytest.mark.parametrize(
    ("text", "before", "expected"),
    [
        ("It is 12.<|im_end|>", "<think>\n\n</think>\n\n", message("It is 12.")),
        (
            "Hm.\n</think>\n\n<tool_call>\n<function=search>\n<parameter=query>\na <b>\nc\n</parameter>\n"
            '<parameter=n>\n3\n</parameter>\n<parameter=filter>\n{"k": [null]}\n</parameter>\n'
            "</function>\n</tool_call><|im_end|>",
            "<think>\n",
            message("", call("search", {"query": "a <b>\nc", "n": 3, "filter": {"k": [None]}}), thought="Hm."),
        ),
        (
            "Now.\n<tool_call>\n<function=ping>\n</function>\n</tool_call>\n<tool_call><function=ping></function>"
            "</tool_call><|im_end|>",
            "",
            message("Now.", call("ping", {}), call("ping", {})),
        ),
        (f"{QWEN_CALL}<|im_end|>", "", message(QWEN_CALL)),
    ],
)
def test_qwen_with_tags(text, before, expected):
    assert parse("tagged", text, before, [SEARCH]) == expected


def test_tags_hold_text_if_no_schema_says_otherwise():
    text = "<tool_call><function=search><parameter=n>\n3\n</parameter></function></tool_call><|im_end|>"
    assert parse("tagged", text) == message("", call("search", {"n": "3"}))
    assert parse("tagged", text, tools=[SEARCH]) == message("", call("search", {"n": 3}))
    assert parse("plain", "<call>lookup ab 2<end>") == message("", call("lookup", {"input": "ab 2"}))


PING_TAGS = "<tool_call>\n<function=ping>\n</function>\n</tool_call>\n<|im_end|>"


@pytest.mark.parametrize(
    ("text", "before", "expected"),
    [
        ("Hm.\n</think>\nIt is 12.<|im_end|>", "<think>\n", message("It is 12.", thought="Hm.")),
        (f"Hm.\n</think>\nNow.\n{PING_TAGS}", "<think>\n", message("Now.", call("ping", {}), thought="Hm.")),
        (f"\n</think>{PING_TAGS}", "<think>\n", message("", call("ping", {}))),
        (f"Now.\n{PING_TAGS}", "<think>\n", message("Now.", call("ping", {}))),
        (f"Now.\n{PING_TAGS}", "<think></think>", message("Now.", call("ping", {}))),
    ],
)
def test_nemotron(text, before, expected):
    assert parse("nemotron", text, before) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It is 12.<|eot_id|>", message("It is 12.")),
        ('{"name": "multiply", "parameters": {"a": 3, "b": 4}}<|eot_id|>', message("", CALL)),
        ('{"name": "ping", "parameters": {}}<|eot_id|>', message("", call("ping", {}))),
        ('{"name": "f", "parameters": {"s": "} <|x|>"}}<|eot_id|>', message("", call("f", {"s": "} <|x|>"}))),
        ('Sure: {"name": "ping", "parameters": {}}<|eot_id|>', message("Sure:", call("ping", {}))),
        ('{"name": "f", "parameters": {"a": }}<|eot_id|>', message('{"name": "f", "parameters": {"a": }}')),
        ('{"name": "f", "parameters": {"a": 1}}', message('{"name": "f", "parameters": {"a": 1}}')),
        ('{"name": "f", "arguments": {"a": 1}}<|eot_id|>', message('{"name": "f", "arguments": {"a": 1}}')),
    ],
)
def test_llama(text, expected):
    assert parse("llama", text) == expected


LOOKUP = described("lookup", key="string", times="integer", all="boolean")
PING = described("ping")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abc<end>", message("abc")),
        ("abc", message("abc")),
        ("<call>lookup ab 2 true<end>", message("", call("lookup", {"key": "ab", "times": 2, "all": True}))),
        ("<call>lookup 2 2<end>", message("", call("lookup", {"key": "2", "times": 2}))),
        ("<call>lookup ab c false x<end>", message("", call("lookup", {"key": "ab", "times": "c", "all": "false x"}))),
        ("<call>lookup<end>", message("", call("lookup", {}))),
        ("<call>find ab cd<end>", message("", call("find", {"input": "ab cd"}))),
        ("hm <call>ping<call>find a<end>", message("hm", call("ping", {}), call("find", {"input": "a"}))),
        ("<call>ping 3<end>", message("", call("ping", {"input": "3"}))),
        ("<call><end>", message("")),
        ("<call>lookup ab", message("lookup ab")),
    ],
)
def test_plain(text, expected):
    assert parse("plain", text, tools=[LOOKUP, PING]) == expected


NESTED = '<tool_call>{"name": "f", "arguments": {"a": %s}}</tool_call>'


@pytest.mark.parametrize(
    "value",
    [
        "[" * 100_000, "[" * 100_000 + "]" * 100_000, '{"a":' * 5_000 + "1" + "}" * 5_000,
        "[" * MAX_NESTING + "]" * MAX_NESTING, "1" * 10_000,
    ],
    ids=["open", "closed", "objects", "just too deep", "digits"],
)  # fmt: skip
def test_values_that_cannot_be_handled_make_a_turn_text(value):
    text = NESTED % value
    assert parse("qwen", text + "<|im_end|>") == message(text)


def test_arguments_that_are_cast_are_not_nested_deeply_either():
    schema = described("f", a="array")
    for depth, expected in ((3, [[[]]]), (MAX_NESTING, None)):
        text = NESTED % f'"{"[" * depth + "]" * depth}"'
        calls = [] if expected is None else [call("f", {"a": expected})]
        assert parse("qwen", text, tools=[schema]) == message("" if calls else text, *calls)


def test_odd_values_are_kept():
    deep = MAX_NESTING - 6  # the message, its list, the call, the function, its arguments, and the innermost list
    text = '{"big": 1e999, "nan": NaN, "low": -Infinity, "twice": 1, "twice": 2, "deep": %s}' % (
        "[" * deep + "]" * deep
    )
    arguments = parse("qwen", NESTED % text)["tool_calls"][0]["function"]["arguments"]["a"]
    assert arguments["big"] == float("inf")
    assert arguments["nan"] != arguments["nan"]
    assert arguments["low"] == -float("inf")
    assert arguments["twice"] == 2
    assert json.dumps(arguments["deep"]) == "[" * deep + "]" * deep


def test_lone_surrogates_are_replaced():
    parsed = parse(
        "qwen", r'<tool_call>{"name": "f\ud800", "arguments": {"\udfff": ["\ud83c\udf89 \udc00"]}}</tool_call>'
    )
    assert parsed == message("", call("f\ufffd", {"\ufffd": ["🎉 \ufffd"]}))
    json.dumps(parsed, ensure_ascii=False).encode()


PIECES = [
    "<think>",
    "<think></think>",
    "<parameter=",
    "<parameter=a>",
    '{"name": "',
    '{"name": "f", "parameters": ',
    " ",
]


@pytest.mark.parametrize("family", ["qwen", "tagged", "llama"])
@pytest.mark.parametrize("piece", [*PIECES, " "])
def test_long_repetitive_turns_end(family, piece):
    """Expressions with more than linear cost would hang here."""
    for beginning in ("", "<tool_call><function=f><parameter=a>"):
        with contextlib.suppress(MalformedTurnError):
            assert FORMATS[family].parser.parse(beginning + piece * 20_000 + "x", ())["role"] == "assistant"


@pytest.fixture
def registered():
    before = list(families._PARSERS)
    yield
    families._PARSERS[:] = before


@pytest.mark.usefixtures("registered")
def test_users_add_parsers():
    def shout(text, tools):
        if "?" in text:
            raise MalformedTurnError("a question")
        return message("", call(text.removesuffix("<|im_end|>").upper(), {"tools": len(tools)}))

    template = "{% for m in messages %}<shout>{{ m.content }}<|im_end|>{% endfor %}<tool_call>"
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = template
    assert ChatFormat(tokenizer).parser is None
    register_tool_parser(ToolParser("shout", ("<shout>",), "<shout>", shout))
    chat = ChatFormat(tokenizer)
    prefix_ids = tokenizer("<shout>hi<|im_end|><shout>a")["input_ids"]
    assert chat.parse(tokenizer("bc<|im_end|>")["input_ids"], prefix_ids, [PING]) == message(
        "", call("ABC", {"tools": 1})
    )
    assert chat.parse(tokenizer("bc?<|im_end|>")["input_ids"], prefix_ids) == message("bc?")
    register_tool_parser(ToolParser("shout", ("<whisper>",), "<whisper>", shout))
    assert ChatFormat(tokenizer).parser is None


def test_a_turn_that_no_parser_knows_is_text():
    chat = ChatFormat(qwen_tokenizer(), "{{ messages }}")
    assert chat.parse(chat.tokenizer(f"{QWEN_CALL}<|im_end|>")["input_ids"]) == message(QWEN_CALL)


def test_what_a_prompt_wrote_of_the_turn_is_found_far_back():
    chat = FORMATS["qwen"]
    written = "The answer, at length: " + "x" * 1_000
    parsed = parse("qwen", " 12<|im_end|>", written)
    assert parsed == message(written + " 12")
    assert chat.parse(chat.tokenizer(" 12<|im_end|>")["input_ids"], chat.tokenizer("y" * 500)["input_ids"]) == message(
        "12"
    )


RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<do>",
            "close": "</do>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}


def test_a_response_template_of_the_tokenizer_precedes_the_family():
    tokenizer = qwen_tokenizer()
    tokenizer.response_template = RESPONSE_TEMPLATE
    chat = ChatFormat(tokenizer, "qwen3")
    chat.check_tools()

    def parse_with_template(text, before=""):
        prefix_ids = tokenizer(HEADERS["qwen"] + before)["input_ids"]
        return chat.parse(tokenizer(text)["input_ids"], prefix_ids)

    assert parse_with_template("a<do>" + '{"name": "f"}' + "</do><|im_end|>") == message("a", call("f", {}))
    assert parse_with_template('"f"}</do><|im_end|>', '<do>{"name": ') == message("", call("f", {}))
    assert parse_with_template("<do>{}</do><|im_end|>") == message("<do>{}</do>")
    assert parse_with_template("<do>" + "[" * 100_000 + "</do><|im_end|>")["content"].startswith("<do>[[")
    assert parse_with_template("<|im_end|>") == message("")
    assert chat.parse([]) == message("")
    chat.close()


TAG_PATTERN = r"<parameter=(?P<key>\w+)>\s*(?P<value>.*?)\s*</parameter>"
BACKTRACKING_TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": TAG_PATTERN},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}


def test_a_response_template_that_backtracks_is_stopped(caplog):
    tokenizer = qwen_tokenizer()
    tokenizer.response_template = BACKTRACKING_TEMPLATE
    chat = copy.deepcopy(ChatFormat(tokenizer, "qwen3"))
    prefix_ids = tokenizer(HEADERS["qwen"])["input_ids"]
    try:
        chat.check_tools()
        worker = chat._template_parser._process.pid
        assert worker != os.getpid()
        for blanks in (10_000, 20_000):  # its time is cubic: this would take an hour
            text = "<tool_call><function=search><parameter=n>" + " " * blanks
            assert chat.parse(tokenizer(text)["input_ids"], prefix_ids, [SEARCH]) == message(text)
        assert caplog.text.count("it took longer than 2 seconds. Such turns count as text") == 1
        text = "<tool_call><function=search><parameter=n> 3 </parameter></function></tool_call><|im_end|>"
        assert chat.parse(tokenizer(text)["input_ids"], prefix_ids, [SEARCH]) == message("", call("search", {"n": 3}))
        assert chat._template_parser._process.pid == worker
        assert copy.deepcopy(chat)._template_parser is None
    finally:
        chat.close()
    assert not psutil.pid_exists(worker)


def test_a_script_without_a_guard_can_parse(tmp_path):
    """The worker process imports the package, but not the script that is being run."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from tests.chat.test_parse import RESPONSE_TEMPLATE, ChatFormat, qwen_tokenizer\n"
        "tokenizer = qwen_tokenizer()\n"
        "tokenizer.response_template = RESPONSE_TEMPLATE\n"
        "print(ChatFormat(tokenizer, 'qwen3').parse(tokenizer('hello<|im_end|>')['input_ids']))\n"
    )
    done = subprocess.run(
        [sys.executable, script, Path(__file__).parents[2]], capture_output=True, text=True, timeout=120
    )
    assert "'content': 'hello'" in done.stdout, done.stderr


def test_a_response_template_that_is_malformed_ends_the_run_at_setup():
    tokenizer = qwen_tokenizer()
    tokenizer.response_template = {"fields": {"content": {"open_pattern": "("}}}
    with pytest.raises(ValueError, match=r"Field 'content': invalid open_pattern regex"):
        ChatFormat(tokenizer, "qwen3").check_tools()
