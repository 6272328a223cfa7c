"""The critic's side of an update: the clipped value loss, and how much of the returns the values explain.

Knows nothing of networks. As with the other losses, the denominator of the whole minibatch comes from outside.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .losses import LossResult


def value_loss(
    values: Tensor, old_values: Tensor, targets: Tensor, *, clip: float | None = 0.2, denominator: float | Tensor
) -> LossResult:
    """Clipped value loss.

    L = Σ ½ max((V − T)², (V_c − T)²) / D with V_c = V_old + clip(V − V_old, −ε, ε): a value that has moved more than ε
    towards its target has no gradient until the next iteration. Without ε it is Σ ½ (V − T)² / D. Source: the public
    code of PPO (arXiv 1707.06347), which adds this to the paper's squared error.

    Args:
        values: V of each turn's state under the critic, with gradient, any shape.
        old_values: Those before the first update of the iteration, same shape.
        targets: T, what V should be, same shape.
        clip: ε > 0, or None for no clipping.
        denominator: D, the turns of the whole minibatch, positive.

    Returns:
        The loss and, as shares of D, so that those of all micro-batches add up: `value_clip_frac` (the clipped branch
        was taken). No turns: all 0.

    Raises:
        ValueError: Shapes that differ, or a number outside its range.
    """
    if not values.shape == old_values.shape == targets.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (values, old_values, targets))
        raise ValueError(f"values: shapes {shapes} of values, old values and targets; expected the same")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip: {clip} is not positive; 0.2 is the usual value, null is no clipping")
    if not denominator > 0:
        raise ValueError(f"denominator: {denominator} is not positive; give the number of turns")
    squares = (values - targets) ** 2
    is_clipped = torch.zeros_like(values, dtype=torch.bool)
    if clip is not None:
        held = old_values + (values - old_values).clamp(-clip, clip)
        held_squares = (held - targets) ** 2
        is_clipped = held_squares > squares
        squares = torch.maximum(squares, held_squares)
    loss = 0.5 * squares.sum() / denominator
    return LossResult(loss, {"value": loss.detach(), "value_clip_frac": is_clipped.sum() / denominator})


def explained_variance(n: float, targets: float, targets_squared: float, errors: float, errors_squared: float) -> float:
    """1 − Var(T − V) / Var(T), from sums over n turns of T, T², T − V and (T − V)²; 0 where T does not vary.

    1 is a perfect critic, 0 one as good as a constant, below 0 a worse one.
    """
    variance = targets_squared / n - (targets / n) ** 2
    if variance <= 1e-12 * targets_squared / n:  # round-off
        return 0.0
    return 1.0 - (errors_squared / n - (errors / n) ** 2) / variance
