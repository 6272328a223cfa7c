"""Checks that the options of several detectors share; a message names the detector's class and the option."""

from __future__ import annotations

from collections.abc import Sequence

from gigpo_lightning.functional.steering import Band


def check_threshold(detector: object, threshold: float) -> None:
    """Refuse a threshold outside [0, 1].

    Raises:
        ValueError: It is.
    """
    if not 0 <= threshold <= 1:
        raise ValueError(
            f"{type(detector).__name__}.threshold={threshold}: must lie in [0, 1]; 1 is equality, 0.95 a usual value"
        )


def read_band(detector: object, target_density: Sequence[float] | None) -> Band | None:
    """The band of a density, or None for no steering.

    Raises:
        ValueError: It is no pair 0 ≤ low < high ≤ 1.
    """
    if target_density is None:
        return None
    if len(target_density) != 2 or not 0 <= target_density[0] < target_density[1] <= 1:
        raise ValueError(
            f"{type(detector).__name__}.target_density={list(target_density)}: must be [low, high] with "
            "0 ≤ low < high ≤ 1, [0.15, 0.25] is usual; null for no steering"
        )
    return Band(*target_density)
