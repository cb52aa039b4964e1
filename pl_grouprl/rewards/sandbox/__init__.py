"""A sandbox for programs that a model wrote: a child process with limits, no network, and none of our files."""

from pl_grouprl.rewards.sandbox.limits import SandboxLimits
from pl_grouprl.rewards.sandbox.sandbox import ProgramResult, Sandbox, SandboxUnavailableError

__all__ = ["ProgramResult", "Sandbox", "SandboxLimits", "SandboxUnavailableError"]
