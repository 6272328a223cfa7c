"""Detectors of anchor states: which turns of a task group left the same state."""

from __future__ import annotations

from .base import Detector, TurnTable
from .exact import ExactDetector
from .manual import HybridDetector, ManualDetector
from .named import make_detector
from .nearness import EmbeddingDetector, SimilarityDetector
from .patterns import Pattern
from .window import WindowDetector

__all__ = [
    "Detector",
    "EmbeddingDetector",
    "ExactDetector",
    "HybridDetector",
    "ManualDetector",
    "Pattern",
    "SimilarityDetector",
    "TurnTable",
    "WindowDetector",
    "make_detector",
]
