"""Everything that steers or shows the training, one callback a file."""

from __future__ import annotations

from .anchor_library import AnchorLibrary
from .checkpoint import IterationCheckpoint
from .curriculum import Curriculum
from .durable import newest_complete
from .evaluation_files import EvaluationFiles
from .exploration import Exploration
from .lambda_decay import LambdaDecay
from .progress import IterationProgress
from .views import TensorBoardViews
from .warm_start import WarmStart

__all__ = [
    "AnchorLibrary",
    "Curriculum",
    "EvaluationFiles",
    "Exploration",
    "IterationCheckpoint",
    "IterationProgress",
    "LambdaDecay",
    "TensorBoardViews",
    "WarmStart",
    "newest_complete",
]
