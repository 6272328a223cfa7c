"""Anchors that the user names, alone or together with those that another detector finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gigpo_lightning.detectors.base import Detector, Gather, TurnTable
from gigpo_lightning.detectors.named import make_detector
from gigpo_lightning.detectors.patterns import Label, Pattern, matcher
from gigpo_lightning.functional.anchors import group_exact


class ManualDetector(Detector):
    """Turns of a task group that match the same pattern, and in which it captures the same, form a step group.

    The first pattern that matches counts. A turn that matches none is no anchor.

    Args:
        patterns: At least one.

    Raises:
        ValueError: A pattern that cannot be used, or none.
    """

    def __init__(self, patterns: Sequence[Pattern] = ()):
        if not patterns:
            raise ValueError(
                "ManualDetector.patterns is empty: name at least one, such as {observation: You pick up the (.+) from}"
            )
        self._label = matcher("ManualDetector.patterns", patterns)

    def detect(self, table: TurnTable) -> Tensor:
        return _by_labels([self._label(turn) for turn in table.turns], table.group_ids)


class HybridDetector(Detector):
    """What a detector finds, and what the user names, without what the user excludes: automatic ∪ manual − excluded.

    A turn that matches a pattern of `exclude` is no anchor, whatever else matches it. Of the others, those that match
    `manual` form step groups as in `ManualDetector`. `automatic` sees only the turns that are left.

    Args:
        automatic: The detector of the remaining turns; a `target_density` is its own option, and the density is that of
            all turns.
        manual: Patterns that always make a turn an anchor.
        exclude: Patterns of turns that are never anchors.

    Raises:
        ValueError: A pattern that cannot be used, no pattern at all, or an unknown detector.
    """

    def __init__(
        self,
        automatic: Detector | str = "exact",
        manual: Sequence[Pattern] = (),
        exclude: Sequence[Pattern] = (),
    ):
        if not manual and not exclude:
            raise ValueError(
                "HybridDetector: neither manual nor exclude has a pattern; name one, or take the automatic detector "
                "alone"
            )
        self.automatic = make_detector("HybridDetector.automatic", automatic)
        self._manual, self._exclude = (
            matcher("HybridDetector.manual", manual),
            matcher("HybridDetector.exclude", exclude),
        )

    @property
    def kind(self) -> str:
        """What it remembers is what its automatic detector does."""
        return f"{type(self).__name__} of {self.automatic.kind}"

    def detect(self, table: TurnTable) -> Tensor:
        excluded = [self._exclude(turn) is not None for turn in table.turns]
        labels = [None if out else self._manual(turn) for turn, out in zip(table.turns, excluded, strict=True)]
        rest = [i for i, (label, out) in enumerate(zip(labels, excluded, strict=True)) if label is None and not out]
        step_groups = _by_labels(labels, table.group_ids)
        if rest:
            step_groups[rest] = self.automatic.detect(table.take(rest)) + len(table.turns)
        return step_groups.unique(return_inverse=True)[1]

    def metrics(self) -> dict[str, float]:
        return self.automatic.metrics()

    def end_iteration(self, density: float, gather: Gather) -> None:
        self.automatic.end_iteration(density, gather)

    def state_dict(self) -> dict[str, Any]:
        return self.automatic.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.automatic.load_state_dict(state)


def _by_labels(labels: Sequence[Label | None], group_ids: Tensor) -> Tensor:
    """Turns of a task group with equal labels together, each without a label alone; ids below the number of turns."""
    keys = [(i,) if label is None else (None, *label) for i, label in enumerate(labels)]
    return group_exact(keys, group_ids) if keys else torch.zeros(0, dtype=torch.int64)
