"""A sandbox for model-written programs: a child process with limits, without network or access to our files."""

from pl_grouprl.rewards.sandbox.limits import SandboxLimits
from pl_grouprl.rewards.sandbox.sandbox import ProgramResult, Sandbox, SandboxUnavailableError

__all__ = ["ProgramResult", "Sandbox", "SandboxLimits", "SandboxUnavailableError"]
