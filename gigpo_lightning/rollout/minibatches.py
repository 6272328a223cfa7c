"""From the stored rows of an iteration to the minibatches of its updates: which rows, in which order, cut how.

Rows are read from the file when their micro-batch is asked for. Knows nothing of how they were played or credited.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gigpo_lightning.batch import LazyMicroBatches, MicroBatch, Minibatch, cut_by_tokens
from gigpo_lightning.rollout.plan import plan_rows
from gigpo_lightning.rollout.rescore import Rescore, no_rescore
from gigpo_lightning.rollout.store import RolloutStore


def minibatches_of(
    store: RolloutStore,
    *,
    passes: int,
    minibatches: int,
    max_tokens: int,
    temperature: float,
    seed: int,
    rank: int,
    iteration: int,
    skip_zero_advantage: bool = False,
    rescore: Rescore = no_rescore,
) -> Iterator[Minibatch]:
    """All minibatches of an iteration, pass by pass; always `passes` × `minibatches` of them.

    Before the first, while the weights are still those that sampled, `rescore` may rate the rows anew.
    """
    trained = (store.chosen_counts > 0) | store.valued
    trainable = np.flatnonzero(trained & (store.teaches | (not skip_zero_advantage)))
    rescored = rescore(store, trainable, temperature, max_tokens)

    def micro_batch(numbers: list[int]) -> MicroBatch:
        micro = store.micro_batch(numbers)
        return micro if rescored is None else rescored.correct(micro, numbers)

    for index in range(passes):
        parts = plan_rows(len(trainable), minibatches, seed=seed, rank=rank, iteration=iteration, pass_index=index)
        for part in parts:
            rows = trainable[part]
            cuts = cut_by_tokens([int(store.token_counts[r]) for r in rows], max_tokens)
            numbers = [[int(rows[i]) for i in cut] for cut in cuts]
            yield Minibatch(LazyMicroBatches(micro_batch, numbers), temperature)
