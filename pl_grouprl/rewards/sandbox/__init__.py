"""A sandbox for model-written programs: a child process with limits, without network or access to our files."""

from pl_grouprl.rewards.sandbox.sandbox import ProgramResult, Sandbox, SandboxLimits, SandboxUnavailableError

__all__ = ["ProgramResult", "Sandbox", "SandboxLimits", "SandboxUnavailableError"]
