"""Autocast while nothing is trained: weights are converted once, not in every step of decoding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


@contextmanager
def kept_casts() -> Iterator[None]:
    """Weights that autocast has converted stay so for as long as this lasts; nothing may be trained meanwhile.

    Lightning's autocast keeps none. Frozen weights are converted every time all the same: autocast keeps those only
    that require a gradient.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(True)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        torch.clear_autocast_cache()


def without_gradients(device_type: str) -> AbstractContextManager[object]:
    """Inference mode; under autocast, which keeps nothing in that, no gradients."""
    return torch.no_grad() if torch.is_autocast_enabled(device_type) else torch.inference_mode()
