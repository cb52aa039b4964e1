"""The conversations by name: TRL's, calls, results, limits, environments."""

from __future__ import annotations

from helpers.tool_cases.case import DONE, END, GOOD, ToolCase, call, call_json, conversation, user
from helpers.tool_cases.environments import (
    Columns,
    Counter,
    CounterTask,
    EchoTask,
    OwnTask,
    RewardingCounter,
    numbered_environments,
)
from helpers.tool_cases.tools import fail, fail_later, give, multiply, multiply_later, repeat, show

FROM_TRL = {
    "sync tool": ToolCase(
        ((GOOD, DONE), (call("multiply", a=3, c=4) + END, DONE), ("I don't know any tool" + END,)), tools=(multiply,)
    ),
    "async tool": ToolCase(
        (
            (call("multiply_later", a=3, b=4) + END, DONE),
            (call("multiply_later", a=3, c=4) + END, DONE),
            ("I don't know any tool" + END,),
        ),
        tools=(multiply_later,),
    ),
    "malformed calls": ToolCase(
        (
            (call_json('{"arguments": {"a": 3, "b": 4}}') + END,),
            ('<toolcall>\n{"arguments": {"a": 3, "b": 4}}\n</toolcall>' + END,),
            (call_json('{"arguments": {a: 3, b: 4}}') + END,),
        ),
        tools=(multiply,),
    ),
    "environment": ToolCase(
        (
            (call("increment", step=1) + END, DONE),
            (call("decrement", step=2) + END, DONE),
            ("I won't increment" + END,),
        ),
        environment_factory=Counter,
    ),
    "rewarding environment": ToolCase(
        (
            (call("increment", step=1) + END, call("increment", step=2) + END, DONE),
            (call("decrement", step=2) + END, DONE),
            ("I won't increment" + END,),
        ),
        environment_factory=RewardingCounter,
    ),
    "environments by name": ToolCase(
        ((call("increment", step=1) + END, DONE), ("I won't" + END,), (call("shout", text="hi") + END, DONE), (DONE,)),
        rows=({"environment": "counter"}, {"environment": "echo"}),
        environment_factory={"counter": CounterTask, "echo": EchoTask},
    ),
    "tools of another environment": ToolCase(
        ((call("shout", text="hi") + END, DONE), (call("increment", step=1) + END, DONE)),
        rows=({"environment": "counter"}, {"environment": "echo"}),
        environment_factory={"counter": CounterTask, "echo": EchoTask},
    ),
    "rewards by environment": ToolCase(
        ((call("increment", step=2) + END, DONE), (DONE,), (call("increment", step=3) + END, DONE)),
        rows=({"environment": "scored"}, {"environment": "plain"}, {"environment": "again"}),
        environment_factory={"scored": RewardingCounter, "plain": Counter, "again": RewardingCounter},
    ),
    "environment without tools": ToolCase(
        (("<think>\nHm.\n</think>\n\nDone!" + END,), (GOOD,), ("<|im_start|>" + END,)), environment_factory=OwnTask
    ),
    "environment owns the data": ToolCase(
        (("Done!" + END,), ("DoneDone!" + END,), ("DoneDoneDone!" + END,)), rows=({},), environment_factory=OwnTask
    ),
}
"""What TRL's own tests of tools and environments do."""

CALLS = {
    "calls in parallel": ToolCase(
        (("\n".join(call("multiply", a=n, b=n) for n in (2, 3, 4)) + END, DONE),), tools=(multiply,)
    ),
    "calls without a line between": ToolCase(
        ((call("multiply", a=1, b=2) + call("repeat", text="x", times=3) + END, DONE),), tools=(multiply, repeat)
    ),
    "sync and async in one turn": ToolCase(
        (
            (
                call("multiply_later", a=9, b=1)
                + call("multiply", a=2, b=2)
                + call("multiply_later", a=1, b=3)
                + call("nothing")
                + call("fail_later", kind="key")
                + END,
                DONE,
            ),
        ),
        tools=(multiply, multiply_later, fail_later),
    ),
    "content before a call": ToolCase((("Let me see.\n" + GOOD, "It is 12." + END),), tools=(multiply,)),
    "content after a call": ToolCase(
        (
            (call("multiply", a=3, b=4) + "\nWait for it." + END, DONE),
            ("First.\n" + call("multiply", a=3, b=4) + "\nThen.\n" + call("multiply", a=1, b=4) + "Last." + END, DONE),
        ),
        tools=(multiply,),
    ),
    "thinking": ToolCase(
        (
            ("<think>\nI need a product.\n</think>\n\n" + GOOD, "<think>\n12\n</think>\n\nIt is 12." + END),
            ("<think>\n\n</think>\n\n" + GOOD, "<think>\n\n</think>\n\nIt is 12." + END),
            ("<think>\nShould I write " + call("multiply", a=1, b=1) + "?\n</think>\n\nNo." + END,),
            ("<think>\nNever ends " + call("multiply", a=1, b=1) + END,),
        ),
        tools=(multiply,),
    ),
    "thinking switched off": ToolCase(
        ((GOOD, "It is 12." + END),), tools=(multiply,), template_kwargs={"enable_thinking": False}
    ),
    "nested arguments": ToolCase(
        (
            (
                call("show", value={"list": [1, [2.5, None]], "map": {"x": {"y": True}}, "text": 'a "b" \\ \n c'})
                + END,
                DONE,
            ),
            (call("show", value=[1, 2]) + END, DONE),
            (call("show", value="plain") + END, DONE),
            (call("show", value=None) + END, DONE),
        ),
        tools=(show,),
    ),
    "arguments as text": ToolCase(
        (
            (call("multiply", a="3", b="4") + END, DONE),
            (call("multiply", a="three", b=4) + END, DONE),
            (call("show", value='{"a": 1}') + END, DONE),
            (call_json('{"name": "multiply", "arguments": "{\\"a\\": 3, \\"b\\": 4}"}') + END, DONE),
            (call_json('{"name": "multiply", "arguments": [3, 4]}') + END, DONE),
            (call_json('{"name": "multiply", "arguments": 7}') + END, DONE),
        ),
        tools=(multiply, show),
    ),
    "strange calls": ToolCase(
        (
            (call_json('{"name": "multiply", "arguments": {"a": 3, "b": 4}, "more": 1}') + END, DONE),
            (call_json('[{"name": "multiply", "arguments": {"a": 3, "b": 4}}]') + END, DONE),
            (call_json('{"name": 7, "arguments": {}}') + END, DONE),
            (call_json('{"name": "", "arguments": {}}') + END, DONE),
            ("<tool_call>" + END, DONE),
            (call_json("") + END, DONE),
            (
                call_json('{"name": "multiply", "arguments": {"a": 3, "b": 4}}').removesuffix("\n</tool_call>") + END,
                DONE,
            ),
            (call_json('{"name": "multiply", "arguments": {"a": 3, "a": 5, "b": 4}}') + END, DONE),
            (call_json('{"name": "multiply", "arguments": {"a": 1e1, "b": NaN}}') + END, DONE),
            (call("multiply", a=3, b=4) + call_json("{broken") + END, DONE),
            ("</tool_call>" + call("multiply", a=3, b=4) + END, DONE),
            (call_json('  {"name":"multiply","arguments":{"a":3,"b":4}}  ') + "  " + END, DONE),
            ("```\n" + call("multiply", a=3, b=4) + "\n```" + END, DONE),
            (call_json('{"function": {"name": "multiply", "arguments": {"a": 3, "b": 4}}}') + END, DONE),
        ),
        tools=(multiply,),
    ),
    "empty answers": ToolCase(
        ((END,), ("  \n" + END,), (GOOD, END), (GOOD, "  \n" + END), ("<think>\n\n</think>\n\n" + END,)),
        tools=(multiply,),
    ),
    "earlier calls in the prompt": ToolCase(((GOOD, "12." + END),), rows=(conversation(),), tools=(multiply,)),
}

RESULTS = {
    "kinds of results": ToolCase(
        tuple(
            (call("give", kind=kind) + END, DONE)
            for kind in ("none", "empty", "blank", "float", "true", "dict", "tuple", "bytes", "newlines", "spaces")
        ),
        tools=(give,),
    ),
    "list as a result": ToolCase(((call("give", kind="list") + END, DONE),), tools=(give,)),
    "unicode": ToolCase(
        (
            (call("repeat", text="数 🧮 é", times=2) + END, "Fertig: 数 🧮" + END),
            (call("give", kind="unicode") + END, DONE),
            (call_json('{"name": "repeat", "arguments": {"text": "\\u6570 \\ud83e\\uddee \\n"}}') + END, DONE),
        ),
        rows=(user("Größe? 数"),),
        tools=(repeat, give),
    ),
    "results with marks": ToolCase(
        ((call("give", kind="marks") + END, DONE), (call("give", kind="think") + END, DONE)), tools=(give,)
    ),
    "errors": ToolCase(
        tuple(
            (call(tool, kind=kind) + END, DONE)
            for tool in ("fail", "fail_later")
            for kind in ("quotes", "empty", "key", "arguments", "unicode", "other")
        ),
        tools=(fail, fail_later),
    ),
    "several failures in one turn": ToolCase(
        ((call("nothing", a=1) + call("multiply", a=1) + call("fail", kind="empty") + GOOD, call("fail") + END, DONE),),
        tools=(multiply, fail),
    ),
}

LIMITS = {
    **{
        f"at most {most} rounds of tools": ToolCase(
            ((GOOD, GOOD, GOOD, DONE), (GOOD, DONE), (DONE,)), tools=(multiply,), max_tool_calling_iterations=most
        )
        for most in (0, 1, 2)
    },
    "six turns": ToolCase(
        ((*(call("increment", step=n) + END for n in range(1, 6)), DONE), (GOOD, DONE)),
        tools=(multiply,),
        environment_factory=RewardingCounter,
    ),
    "call cut before its end token": ToolCase(
        ((call("increment", step=1) + END,), (DONE,)), environment_factory=RewardingCounter, max_completion_length=41
    ),
    "first turn cut": ToolCase(
        (("a very long answer " * 12 + END,), (GOOD, DONE)), tools=(multiply,), max_completion_length=160
    ),
    "second turn cut": ToolCase(((GOOD, "and so on " * 20 + END),), tools=(multiply,), max_completion_length=160),
    "second call cut": ToolCase(((GOOD, GOOD, DONE),), tools=(multiply,), max_completion_length=100),
    "result too long": ToolCase(
        (
            (call("repeat", text="ab", times=60) + END, DONE),
            (call("repeat", text="ab", times=2) + END, DONE),
            (call("repeat", text="x") + call("repeat", text="ab", times=60) + END, DONE),
            (call("repeat", text="x") + END, call("repeat", text="y") + END, DONE),
        ),
        tools=(repeat,),
        max_completion_length=170,
    ),
    **{
        f"result that leaves {room} tokens": ToolCase(
            ((call("repeat", text="x", times=110 - room) + END, "12345" + END),),
            tools=(repeat,),
            max_completion_length=181,
        )
        for room in (-1, 0, 1, 6)
    },
}


def environment_cases() -> dict[str, ToolCase]:
    """Those with environments, some of which count their instances from 0."""
    return {
        "observations that differ": ToolCase(
            (
                *((call("who") + END, "Number." + END), ("None." + END,), (call("who") + END, call("who") + END, DONE)),
                *((DONE,), (call("whom") + END, DONE), (DONE,)),
            ),
            rows=(user("Hello."), user("Goodbye.")),
            environment_factory=numbered_environments(),
        ),
        "no arguments": ToolCase(
            (
                (call("who") + END, DONE),
                (call_json('{"name": "who"}') + END, DONE),
                (call_json('{"name": "who", "arguments": null}') + END, DONE),
                (call("who", nobody=1) + END, DONE),
            ),
            environment_factory=numbered_environments(),
        ),
        "columns": ToolCase(
            ((call("look") + call("wait", steps=3) + END, DONE), (call("reset") + END, DONE)),
            rows=(user("Look.", difficulty=3, topic="math"), user("Look again.", difficulty=4, topic="art")),
            environment_factory=Columns,
        ),
        "tools and an environment": ToolCase(
            ((call("increment", step=2) + GOOD, call("_count") + call("get_reward") + END, DONE), (GOOD, DONE)),
            tools=(multiply, multiply_later),
            environment_factory=RewardingCounter,
        ),
        "system message and observation": ToolCase(
            ((call("look") + END, DONE),), rows=({**conversation(), "difficulty": 2},), environment_factory=Columns
        ),
    }


def tool_cases() -> dict[str, ToolCase]:
    """All cases by name; made anew for each run, so that environments that count their instances begin at 0."""
    return {**FROM_TRL, **CALLS, **RESULTS, **LIMITS, **environment_cases()}
