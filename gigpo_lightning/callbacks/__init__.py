"""Everything that steers or shows the training, one callback a file."""

from __future__ import annotations

from .anchor_library import AnchorLibrary
from .checkpoint import IterationCheckpoint
from .curriculum import Curriculum
from .direct_training import DirectTraining
from .durable import newest_complete
from .evaluation_files import EvaluationFiles
from .exploration import Exploration
from .lambda_decay import LambdaDecay
from .learning_curve import LearningCurve
from .progress import IterationProgress
from .step_budget import StepBudget
from .views import TensorBoardViews
from .warm_start import WarmStart

__all__ = [
    "AnchorLibrary",
    "Curriculum",
    "DirectTraining",
    "EvaluationFiles",
    "Exploration",
    "IterationCheckpoint",
    "IterationProgress",
    "LambdaDecay",
    "LearningCurve",
    "StepBudget",
    "TensorBoardViews",
    "WarmStart",
    "newest_complete",
]
