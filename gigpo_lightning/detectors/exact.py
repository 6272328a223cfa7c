"""Equal anchor keys are the same state."""

from __future__ import annotations

from torch import Tensor

from gigpo_lightning.detectors.base import Detector, TurnTable
from gigpo_lightning.functional.anchors import group_exact


class ExactDetector(Detector):
    """Turns with equal anchor keys form a step group.

    Args:
        target_density: Must be null: equality has nothing that could be steered.

    Raises:
        ValueError: A target density was given.
    """

    def __init__(self, target_density: tuple[float, float] | None = None):
        if target_density is not None:
            raise ValueError(
                f"ExactDetector.target_density={list(target_density)}: equal keys have no threshold to steer; choose "
                "WindowDetector, SimilarityDetector or EmbeddingDetector, or leave it out"
            )

    def detect(self, table: TurnTable) -> Tensor:
        return group_exact(table.keys, table.group_ids)
