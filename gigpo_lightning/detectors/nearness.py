"""Detectors that take states for the same when they are near: by the letters of the text, or by its embedding."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gigpo_lightning.detectors.base import Detector, Gather, TurnTable
from gigpo_lightning.detectors.options import check_threshold, read_band
from gigpo_lightning.functional.anchors import SIMILARITY_METHODS, group_embedded, group_similar
from gigpo_lightning.functional.steering import Threshold, next_threshold


class NearnessDetector(Detector):
    """A detector with a threshold that may be steered.

    Raises:
        ValueError: The threshold is outside [0, 1], or the band is none.
    """

    def __init__(self, threshold: float, target_density: tuple[float, float] | None):
        check_threshold(self, threshold)
        self.band = read_band(self, target_density)
        self._threshold = Threshold(threshold)

    @property
    def threshold(self) -> float:
        """The present threshold."""
        return self._threshold.value

    def detect(self, table: TurnTable) -> Tensor:
        return self._group(table, self.threshold)

    @abstractmethod
    def _group(self, table: TurnTable, threshold: float) -> Tensor:
        """Step groups at this threshold."""

    def metrics(self) -> dict[str, float]:
        return {"anchors/threshold": self.threshold}

    def end_iteration(self, density: float, gather: Gather) -> None:
        if self.band is not None:
            self._threshold = next_threshold(self._threshold, density, self.band)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.band is None else self._threshold._asdict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.band is not None and state:  # without steering, now or then, the option's value holds
            self._threshold = Threshold(**state)


class SimilarityDetector(NearnessDetector):
    """Turns with similar observations form a step group.

    Args:
        threshold: Smallest ratio of a match, in [0, 1]; 1 is equality.
        method: `leader`, the ratio 2·LCS / T of rapidfuzz, whose result does not depend on the order of the turns; or
            `reference`, the rule of the public GiGPO implementation with difflib, slow and dependent on it.
        target_density: Band [low, high] for `anchors/density`: after each iteration the threshold falls where the
            density was below it and rises where it was above; null keeps it as it is.

    Raises:
        ValueError: A number out of its range, or an unknown method.
    """

    def __init__(
        self,
        threshold: float = 0.95,
        method: str = "leader",
        target_density: tuple[float, float] | None = None,
    ):
        super().__init__(threshold, target_density)
        if method not in SIMILARITY_METHODS:
            raise ValueError(f"SimilarityDetector.method={method!r}: choose one of {', '.join(SIMILARITY_METHODS)}")
        self.method = method

    def _group(self, table: TurnTable, threshold: float) -> Tensor:
        return group_similar(table.observations, table.group_ids, threshold, method=self.method)


class EmbeddingDetector(NearnessDetector):
    """Turns whose observations the policy reads alike form a step group.

    The embedding of an observation is the mean over its tokens of the policy's own final hidden states, under the
    weights that played. Thresholds of two models cannot be compared: hidden states of all texts point in similar
    directions.

    Args:
        threshold: Smallest cosine of a match, in [0, 1].
        target_density: Band [low, high] for `anchors/density`: after each iteration the threshold falls where the
            density was below it and rises where it was above; null keeps it as it is.

    Raises:
        ValueError: A number out of its range.
    """

    def __init__(self, threshold: float = 0.95, target_density: tuple[float, float] | None = None):
        super().__init__(threshold, target_density)

    def _group(self, table: TurnTable, threshold: float) -> Tensor:
        if table.embed is None:
            raise ValueError("EmbeddingDetector: there is no policy to ask for embeddings")
        observations = table.observations
        embeddings = table.embed(sorted(set(observations)))
        return group_embedded(observations, table.group_ids, embeddings, threshold)
