"""States that were met often of late: equal anchor keys, counted over a window of iterations or of steps."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gigpo_lightning.detectors.base import Detector, Gather, TurnTable
from gigpo_lightning.detectors.options import read_band
from gigpo_lightning.functional.anchors import group_exact, separate
from gigpo_lightning.functional.steering import LEAST_COUNT, MOST_COUNT, next_count

UNITS = ("iterations", "steps")


class WindowDetector(Detector):
    """Turns with equal anchor keys form a step group if that key of that task was met often enough of late.

    Counted are the turns of the present task group, and those of the same task in the window before the present
    iteration. Turns whose count is below `min_count` are no anchors.

    Args:
        window: How much before the present iteration counts, ≥ 0, in `unit`s; with 0 only the present task group does.
        unit: `iterations` or `steps`. Iterations count whole: with `steps` as many of the last ones as have at most
            `window` turns together, over all processes.
        min_count: Fewest occurrences of an anchor, 2 to 1000. With 2 the step groups are those of `ExactDetector`.
        target_density: Band [low, high] for `anchors/density`: after each iteration `min_count` goes up by one
            where the density was above it, down by one where it was below; null keeps it as it is.

    Raises:
        ValueError: A number out of its range, or an unknown unit.
    """

    def __init__(
        self,
        window: int = 10,
        unit: str = "iterations",
        min_count: int = 3,
        target_density: tuple[float, float] | None = None,
    ):
        if window < 0:
            raise ValueError(f"WindowDetector.window={window}: must be at least 0; 10 iterations is usual")
        if unit not in UNITS:
            raise ValueError(f"WindowDetector.unit={unit!r}: choose one of {', '.join(UNITS)}")
        if not LEAST_COUNT <= min_count <= MOST_COUNT:
            raise ValueError(
                f"WindowDetector.min_count={min_count}: must lie in [{LEAST_COUNT}, {MOST_COUNT}]; one occurrence is "
                "nothing to compare with"
            )
        self.window, self.unit, self.min_count = window, unit, min_count
        self.band = read_band(self, target_density)
        self._past: deque[dict[int, int]] = deque()  # counts of each iteration in the window, oldest first
        self._totals: Counter[int] = Counter()  # their sum
        self._present: Counter[int] = Counter()

    def detect(self, table: TurnTable) -> Tensor:
        step_groups = group_exact(table.keys, table.group_ids)
        sizes = step_groups.bincount()
        digests = _digests(table.names)
        self._present.update(digests)
        before = torch.tensor([self._totals[digest] for digest in digests], dtype=torch.int64)
        return separate(step_groups, sizes[step_groups] + before >= self.min_count)

    def metrics(self) -> dict[str, float]:
        return {"anchors/min_count": float(self.min_count)}

    def end_iteration(self, density: float, gather: Gather) -> None:
        met: Counter[int] = Counter()
        for counts in gather(dict(self._present)):
            met.update(counts)
        self._present.clear()
        self._remember(dict(met))
        if self.band is not None:
            self.min_count = next_count(self.min_count, density, self.band)

    def _remember(self, counts: dict[int, int]) -> None:
        self._past.append(counts)
        self._totals.update(counts)
        while self._past and self._extent() > self.window:
            self._totals -= Counter(self._past.popleft())

    def _extent(self) -> int:
        """How much is remembered, in the unit of the window."""
        return len(self._past) if self.unit == "iterations" else self._totals.total()

    def state_dict(self) -> dict[str, Any]:
        """Tensors: thousands of small objects are slow to write."""
        return {
            "min_count": self.min_count,
            "lengths": torch.tensor([len(counts) for counts in self._past], dtype=torch.int64),
            "keys": torch.tensor([key for counts in self._past for key in counts], dtype=torch.int64),
            "counts": torch.tensor([n for counts in self._past for n in counts.values()], dtype=torch.int64),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.band is not None:  # else the option's value holds
            self.min_count = int(state["min_count"])
        self._past.clear()
        self._totals.clear()
        lengths = state["lengths"].tolist()
        for keys, counts in zip(state["keys"].split(lengths), state["counts"].split(lengths), strict=True):
            self._remember(dict(zip(keys.tolist(), counts.tolist(), strict=True)))


def _digests(names: list[str]) -> list[int]:
    """64 bits of each name: short, and the same in every process, unlike Python's own hash."""
    known = {name: _digest(name) for name in set(names)}
    return [known[name] for name in names]


def _digest(name: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big", signed=True
    )
