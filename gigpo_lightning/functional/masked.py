"""Reductions over the entries that count: a mask is True where an entry counts.

Entries that do not count may hold anything, NaN included: neither their value nor a gradient leaks out.
"""

from __future__ import annotations

import torch
from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of the entries where `mask` is True; 0 where none is.

    Args:
        values: Any shape, floating type.
        mask: Bool, same shape.
        dim: Dimension to reduce; None for all.

    Raises:
        ValueError: The shapes differ or the mask is not boolean.
    """
    kept = _keep(values, mask, 0.0)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the entries where `mask` is True; 0 where none is. Arguments and errors as `masked_sum`."""
    n_kept = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(values, mask, dim) / n_kept.clamp(min=1)


def masked_max(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Largest entry where `mask` is True; −inf where none is. Arguments and errors as `masked_sum`."""
    kept = _keep(values, mask, -torch.inf)
    if dim is None:
        return kept.max() if kept.numel() else kept.new_tensor(-torch.inf)
    return kept.amax(dim)


def _keep(values: Tensor, mask: Tensor, fill: float) -> Tensor:
    if mask.shape != values.shape or mask.dtype != torch.bool:
        raise ValueError(
            f"mask: {mask.dtype} of shape {tuple(mask.shape)}; expected torch.bool of shape {tuple(values.shape)}"
        )
    return torch.where(mask, values, values.new_tensor(fill))
