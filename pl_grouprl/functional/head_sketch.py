"""A random sketch of each token's score, the gradient of its log-probability with respect to the head's weights.

Legend: N tokens, D hidden size, V vocabulary, S size of the sketch.
"""

from __future__ import annotations

import torch
from torch import Tensor


class HeadSketch:
    """Compresses the gradient (e_a - p) h^T, a matrix [V, D] per token, into S numbers that preserve inner products.

        phi_j = (r_j . h) * (s_j . (e_a - p)) / sqrt(S)

    with independent signs r_j over the hidden size and s_j over the vocabulary (Kar and Karnick, AISTATS 2012; bounds
    by Meister, Sarlos and Woodruff, NeurIPS 2019). The expectation of phi(x) . phi(y) over the signs is the
    inner product of the two gradients, and its standard deviation falls as 1 / sqrt(S). Like the score norm, it omits
    the factor 1 / temperature and treats the head as linear in h.

    The seed determines the signs, on every device. They are created on first use and cached, one byte each.

    Args:
        dim: S, at least 1.
        seed: Seed of the signs.

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

    def project(
        self, hidden_ND: Tensor, targets_N: Tensor, other_N: Tensor, mean_NS: Tensor, vocabulary: int
    ) -> Tensor:
        """Sketch the scores of some tokens.

        Args:
            hidden_ND: Hidden states, the head's input, shape [N, D].
            targets_N: Token ids, shape [N].
            other_N: Sum of p_v over all v but the target: 1 - p_a, without its cancellation for p_a near 1.
            mean_NS: Sum of p_v s_v over the same v, shape [N, S].
            vocabulary: V.

        Returns:
            phi, shape [N, S], in the dtype of the probabilities.
        """
        r_DS, s_VS = self.signs(hidden_ND.shape[1], vocabulary, mean_NS.device)
        residual_NS = s_VS[targets_N].to(mean_NS.dtype) * other_N[:, None] - mean_NS
        with torch.autocast(hidden_ND.device.type, enabled=False):
            signed_NS = hidden_ND.to(mean_NS.dtype) @ r_DS.to(mean_NS.dtype)
        return signed_NS.mul_(residual_NS).div_(self.dim**0.5)


def _random_signs(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (rows, columns), generator=generator, dtype=torch.int8, device="cpu").mul_(2).sub_(1)
