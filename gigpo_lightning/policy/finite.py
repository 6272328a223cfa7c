"""Whether weights are numbers at all: asked after every update and of every checkpoint, so it is one pass over them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def not_finite(weights: Iterable[tuple[str, Tensor]]) -> str:
    """The name of the first weight that holds a NaN or an infinity; empty where all are finite.

    Args:
        weights: Names and tensors of any shape, on one device; tensors of whole numbers are passed over.
    """
    floats = [(name, weight.detach()) for name, weight in weights if weight.is_floating_point() and weight.numel()]
    if not floats:
        return ""
    # One such entry makes the sum so; float32, as a sum of good float16 weights may be too large for float16.
    good = torch.stack([weight.sum(dtype=torch.float32) for _, weight in floats]).isfinite()
    return "" if bool(good.all()) else floats[int(good.int().argmin())][0]
