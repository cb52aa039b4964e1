"""Conversations as tokens: renders them by chat templates, and parses the model's turns, including tool calls."""

from pl_grouprl.chat.families import register_tool_parser
from pl_grouprl.chat.format import ChatFormat
from pl_grouprl.chat.parsing import MalformedTurnError, ToolParser
from pl_grouprl.chat.renderer_format import RendererFormat, make_chat_format

__all__ = [
    "ChatFormat",
    "MalformedTurnError",
    "RendererFormat",
    "ToolParser",
    "make_chat_format",
    "register_tool_parser",
]
