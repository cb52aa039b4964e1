"""Formats of the library `renderers`; most need it installed."""

import pytest

from pl_grouprl.chat import ChatFormat, RendererFormat, make_chat_format
from pl_grouprl.chat import format as renderer_format
from pl_grouprl.utilities.optional import RENDERERS_AVAILABLE
from tests.helpers.chat_tokenizers import plain_tokenizer, qwen_tokenizer

needs_library = pytest.mark.skipif(not RENDERERS_AVAILABLE, reason="needs the library renderers")
USER = {"role": "user", "content": "hi"}
RESULTS = [{"role": "tool", "name": "multiply", "content": content} for content in ("12", "é 🎉")]
TOOL = {
    "type": "function",
    "function": {"name": "multiply", "description": "", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 3}}\n</tool_call>'


def test_other_templates_are_none_of_the_library():
    assert type(make_chat_format(plain_tokenizer(), "plain")) is ChatFormat
    assert type(make_chat_format(plain_tokenizer())) is ChatFormat
    names = (None, "renderers", "renderers:qwen3", "renderers/own.jinja")
    assert [renderer_format.uses_renderers(name) for name in names] == [False, True, True, False]


def test_the_library_must_be_there(monkeypatch):
    monkeypatch.setattr(renderer_format, "RENDERERS_AVAILABLE", False)
    with pytest.raises(ModuleNotFoundError, match=r"chat_template='renderers' needs .*pl-grouprl\[renderers\]"):
        make_chat_format(qwen_tokenizer(), "renderers")


@needs_library
def test_it_renders_as_the_built_in_template():
    ours = ChatFormat(qwen_tokenizer(), "qwen3")
    theirs = make_chat_format(qwen_tokenizer(), "renderers:qwen3")
    assert isinstance(theirs, RendererFormat)
    theirs.check_tools()
    assert theirs.encode_prompt([USER], [TOOL]) == ours.encode_prompt([USER], [TOOL])
    assert theirs.render_prompt([USER]) == ours.render_prompt([USER])
    for results in (RESULTS, RESULTS[:1]):
        assert theirs.encode_results(results) == ours.encode_results(results)


@needs_library
def test_options_reach_the_renderer():
    chat = make_chat_format(qwen_tokenizer(), "renderers:qwen3", {"enable_thinking": False})
    assert chat.render_prompt([USER]).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert chat.tokenizer.decode(chat.encode_results(RESULTS)).endswith("<think>\n\n</think>\n\n")


@needs_library
def test_a_prompt_that_opens_a_thought():
    chat = make_chat_format(qwen_tokenizer_with_images(), "renderers:qwen3.5")
    assert chat.tokenizer.decode(chat.encode_results(RESULTS[:1])) == (
        "\n<|im_start|>user\n<tool_response>\n12\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


def qwen_tokenizer_with_images():
    tokenizer = qwen_tokenizer()
    names = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(names)}, replace_extra_special_tokens=False)
    return tokenizer


CUT = f"{CALL[:-15]}</tool_call>"
NAMELESS = CALL.replace('"name": "multiply", ', "")
DEEP = '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 50_000 + "}}</tool_call>"
CALLED = [{"type": "function", "function": {"name": "multiply", "arguments": {"a": 3}}}]


@needs_library
@pytest.mark.parametrize(
    ("text", "before", "expected"),
    [
        ("It is 12.<|im_end|>", "", {"content": "It is 12."}),
        (f"Well.\n{CALL}<|im_end|>", "", {"content": "Well.", "tool_calls": CALLED}),
        ("Hm.\n</think>\n\n12<|im_end|>", "<think>\n", {"content": "12", "reasoning_content": "Hm."}),
        (f"{CUT}<|im_end|>", "", {"content": CUT}),
        (f"{NAMELESS}<|im_end|>", "", {"content": NAMELESS}),
        (DEEP, "", {"content": DEEP}),
        ("", "", {"content": ""}),
    ],
)
def test_it_parses(text, before, expected):
    chat = make_chat_format(qwen_tokenizer(), "renderers:qwen3")
    prefix_ids = chat.encode_prompt([USER]) + (chat.tokenizer(before)["input_ids"] if before else [])
    token_ids = chat.tokenizer(text)["input_ids"] if text else []
    assert chat.parse(token_ids, prefix_ids) == {"role": "assistant", **expected}


@needs_library
def test_renderers_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tokenizer = qwen_tokenizer()
    with pytest.raises(ValueError, match="'qwen17'"):
        make_chat_format(tokenizer, "renderers:qwen17")
    with pytest.raises(ValueError, match="'llama-3'"):
        make_chat_format(tokenizer, "renderers:llama-3")
    tokenizer.chat_template = ChatFormat(tokenizer, "qwen3").source
    with pytest.raises(ValueError, match="DefaultRenderer"):
        make_chat_format(tokenizer, "renderers:default").check_tools()
    with pytest.raises(ValueError, match="cannot leave the last message of the model open"):
        make_chat_format(tokenizer, "renderers:qwen3").encode_prompt([USER, {"role": "assistant", "content": "It"}])
