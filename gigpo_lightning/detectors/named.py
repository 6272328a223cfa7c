"""Detectors by the short names that a configuration may give in place of a class with options."""

from __future__ import annotations

from gigpo_lightning.detectors.base import Detector
from gigpo_lightning.detectors.exact import ExactDetector
from gigpo_lightning.detectors.nearness import EmbeddingDetector, SimilarityDetector
from gigpo_lightning.detectors.window import WindowDetector
from gigpo_lightning.suggest import did_you_mean

# Those that can do without options.
NAMED: dict[str, type[Detector]] = {
    "exact": ExactDetector,
    "window": WindowDetector,
    "similarity": SimilarityDetector,
    "embedding": EmbeddingDetector,
}
_CLASSES = [kind.__name__ for kind in NAMED.values()]
_WITH_OPTIONS = {"manual": "ManualDetector", "hybrid": "HybridDetector"}


def make_detector(option: str, detector: str | Detector) -> Detector:
    """The detector of a short name with its defaults; a detector itself is left as it is.

    Raises:
        ValueError: The name is unknown, or its detector needs options.
    """
    if isinstance(detector, Detector):
        return detector
    if detector in _WITH_OPTIONS:
        raise ValueError(
            f"{option}: {detector!r} needs patterns; write {{class_path: {_WITH_OPTIONS[detector]}, init_args: …}}"
        )
    if detector not in NAMED:
        raise ValueError(
            f"{option}: {detector!r} is unknown; choose one of {', '.join(NAMED)}, or a class with options"
            f"{did_you_mean(str(detector), [*NAMED, *_CLASSES])}"
        )
    return NAMED[detector]()
