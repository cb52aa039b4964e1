"""Scripted conversations with tools and environments, to be run by any trainer that follows TRL's contract."""

from helpers.tool_cases.case import ToolCase, seen_by_reward
from helpers.tool_cases.cases import FROM_TRL, tool_cases
from helpers.tool_cases.environments import OwnTask

__all__ = ["FROM_TRL", "OwnTask", "ToolCase", "seen_by_reward", "tool_cases"]
