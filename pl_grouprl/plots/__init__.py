"""Figures of what happens at the tokens of a response: matplotlib figures, without pyplot's global state."""

from pl_grouprl.plots.advantages import plot_advantages
from pl_grouprl.plots.token_groups import plot_token_groups
from pl_grouprl.plots.tokens import token_texts

__all__ = ["plot_advantages", "plot_token_groups", "token_texts"]
