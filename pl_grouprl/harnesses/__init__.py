"""External harnesses: other libraries play the episodes, with this package's sampling server as their model."""

from pl_grouprl.harnesses.verifiers import Verifiers

__all__ = ["Verifiers"]
