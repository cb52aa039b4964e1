"""Conversations as tokens: renders them by chat templates, and parses the model's turns, including tool calls."""

from pl_grouprl.chat.format import ChatFormat, RendererFormat, make_chat_format
from pl_grouprl.chat.parsing import MalformedTurnError, ToolParser, register_tool_parser

__all__ = [
    "ChatFormat",
    "MalformedTurnError",
    "RendererFormat",
    "ToolParser",
    "make_chat_format",
    "register_tool_parser",
]
