"""A random sketch of each token's score: the gradient of its log-probability by the weights of the language-model head.

Legend: M tokens of one chunk, D hidden size, V vocabulary, S size of the sketch.
"""

from __future__ import annotations

import torch
from torch import Tensor

_COLUMNS = 8192  # of the vocabulary whose signs are floating-point numbers at one time


class HeadSketch:
    """Squeezes the gradient (e_a - p) h^T, a matrix [V, D] per token, into S numbers that keep inner products.

        phi_j = (r_j . h) * (s_j . (e_a - p)) / sqrt(S)

    with independent signs r_j over the hidden size and s_j over the vocabulary (Kar and Karnick, AISTATS 2012; bounds
    by Meister, Sarlos and Woodruff, NeurIPS 2019). The expectation of phi(x) . phi(y) over the signs is the
    inner product of the two gradients, and its standard deviation falls with 1 / sqrt(S). As for the score norm, the
    factor 1 / temperature is left out, and the head is taken as linear in h.

    The signs follow from the seed, on every device alike. They are made at first use and kept, one byte each.

    Args:
        dim: S, at least 1.
        seed: Of the signs.

    Raises:
        ValueError: If dim is less than 1.
    """

    def __init__(self, dim: int = 64, seed: int = 0) -> None:
        if dim < 1:
            raise ValueError(f"dim is {dim}; a sketch has at least 1 number per token, 64 by default.")
        self.dim = dim
        self.seed = seed
        self._signs: dict[tuple[int, int, torch.device], tuple[Tensor, Tensor]] = {}

    def signs(self, hidden_size: int, vocabulary: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Return r, shape [D, S], and s, shape [V, S], both of 1 and -1 in int8."""
        key = (hidden_size, vocabulary, torch.device(device))
        if key not in self._signs:
            generator = torch.Generator().manual_seed(self.seed)
            self._signs[key] = (
                _random_signs(hidden_size, self.dim, generator).to(device),
                _random_signs(vocabulary, self.dim, generator).to(device),
            )
        return self._signs[key]

    def project(self, hidden_MD: Tensor, others_MV: Tensor, targets_M: Tensor) -> Tensor:
        """Sketch the scores of a chunk of tokens.

        Args:
            hidden_MD: What the head reads, shape [M, D].
            others_MV: Probabilities of all tokens but the target, whose place holds 0, shape [M, V]. Their sum stands
                for 1 - p_a, which would cancel where p_a is near 1.
            targets_M: Token ids, shape [M].

        Returns:
            phi, shape [M, S], in the dtype of the probabilities.
        """
        r_DS, s_VS = self.signs(hidden_MD.shape[1], others_MV.shape[1], others_MV.device)
        residual_MS = s_VS[targets_M].to(others_MV.dtype) * others_MV.sum(dim=-1, keepdim=True)
        for part_MC, signs_CS in zip(others_MV.split(_COLUMNS, dim=1), s_VS.split(_COLUMNS), strict=True):
            residual_MS.addmm_(part_MC, signs_CS.to(others_MV.dtype), alpha=-1)
        return (hidden_MD.to(others_MV.dtype) @ r_DS.to(others_MV.dtype)).mul_(residual_MS).div_(self.dim**0.5)


def _random_signs(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (rows, columns), generator=generator, dtype=torch.int8).mul_(2).sub_(1)
