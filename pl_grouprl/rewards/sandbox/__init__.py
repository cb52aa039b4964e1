"""A wall around programs that a model wrote: a child with limits, without network, with nothing of ours to read."""

from pl_grouprl.rewards.sandbox.limits import SandboxLimits
from pl_grouprl.rewards.sandbox.sandbox import ProgramResult, Sandbox, SandboxUnavailableError

__all__ = ["ProgramResult", "Sandbox", "SandboxLimits", "SandboxUnavailableError"]
