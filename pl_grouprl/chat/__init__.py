"""Conversations as tokens: rendering by chat templates, parsing of what the model answers, tools included."""

from pl_grouprl.chat.format import ChatFormat
