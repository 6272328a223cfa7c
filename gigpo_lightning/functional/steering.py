"""Controllers that move a detector's threshold or minimum count until a density lies in a band.

Pure: the state before and a measured density in, the state after out. Knows no detector.
"""

from __future__ import annotations

import math
from typing import NamedTuple

# A distance 1 − threshold below the first is equality for any text; 1 is a threshold of 0.
_LEAST_DISTANCE, _MOST_DISTANCE = 1e-4, 1.0
# By how much the distance is multiplied or divided in one move.
_FIRST_FACTOR, _LEAST_FACTOR, _MOST_FACTOR = 1.5, 1.01, 4.0
LEAST_COUNT, MOST_COUNT = 2, 1000


class Band(NamedTuple):
    """Where a density is wanted."""

    low: float
    high: float

    def side(self, density: float) -> int:
        """1 above the band, −1 below it, 0 inside."""
        return (density > self.high) - (density < self.low)


class Threshold(NamedTuple):
    """A threshold on its way: the factor of the next move and the side of the band that the last one came from."""

    value: float
    factor: float = _FIRST_FACTOR
    side: int = 0


def next_threshold(now: Threshold, density: float, band: Band) -> Threshold:
    """The threshold after an iteration with this density, which falls as the threshold rises.

    The distance d = 1 − threshold is multiplied by the factor where the density was too low, divided by it where it was
    too high, and kept inside the band. A move to the same side as the last makes log factor 1.5 times as large, a
    move back halves it, so that the threshold closes in on any band that is wider than one step of 1 %, from any start,
    and follows a density that drifts. d stays in [1e-4, 1].
    """
    side = band.side(density)
    if side == 0:
        return now
    turned = {0: 1.0, side: 1.5, -side: 0.5}[now.side]
    factor = min(max(math.exp(turned * math.log(now.factor)), _LEAST_FACTOR), _MOST_FACTOR)
    distance = max(1.0 - now.value, _LEAST_DISTANCE) * factor**-side
    return Threshold(1.0 - min(max(distance, _LEAST_DISTANCE), _MOST_DISTANCE), factor, side)


def next_count(count: int, density: float, band: Band) -> int:
    """The minimum count after an iteration with this density, which falls as the count rises: one more or one less.

    Stays in [2, 1000]. Where no whole number gives a density in the band, it goes back and forth between two
    neighbours.
    """
    return min(max(count + band.side(density), LEAST_COUNT), MOST_COUNT)
