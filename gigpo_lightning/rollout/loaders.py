"""Datasets that play when they are iterated, as Lightning's loops expect them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch.utils.data import IterableDataset

from gigpo_lightning.batch import Minibatch
from gigpo_lightning.rollout.evaluation import EvaluationBatch


class Iterations(IterableDataset[Minibatch]):
    """One pass over it is one iteration. It has a length, without which Lightning would prefetch a stale batch."""

    def __init__(self, collect: Callable[[], Iterator[Minibatch]], minibatches: int):
        self._collect, self._minibatches = collect, minibatches

    def __len__(self) -> int:
        return self._minibatches

    def __iter__(self) -> Iterator[Minibatch]:
        return self._collect()


class Evaluations(IterableDataset[EvaluationBatch]):
    """Planned anew for every evaluation, as the stage moves."""

    def __init__(self, batches: Callable[[], Iterator[EvaluationBatch]]):
        self._batches = batches

    def __iter__(self) -> Iterator[EvaluationBatch]:
        return self._batches()
