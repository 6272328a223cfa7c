"""Rollouts that another engine sampled, rated by the policy itself before the first update of their iteration.

The old log-probs of the surrogate are then the policy's own, and every token gets the truncated importance weight of
the difference. The file of the rollouts keeps what the sampler said. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from gigpo_lightning.batch import MicroBatch, cut_by_tokens
from gigpo_lightning.functional.correction import truncated_importance
from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.rollout.store import RolloutStore


@dataclass(frozen=True, slots=True)
class Rescored:
    """What the policy itself says of the sampled tokens, by row of the rollouts, and by how much it differs.

    Attributes:
        logprobs: float32 [chosen tokens] of each rated row, on the CPU.
        importance: their weights, likewise.
        metrics: the `mismatch/*` figures over all rated tokens.
    """

    logprobs: dict[int, torch.Tensor]
    importance: dict[int, torch.Tensor]
    metrics: dict[str, float]

    def correct(self, micro: MicroBatch, rows: Sequence[int]) -> MicroBatch:
        """The micro-batch of these rows with the policy's own old log-probs and the weights.

        A row that was not rated keeps its log-probs, and its weights are 1.
        """
        if not any(row in self.logprobs for row in rows):
            return micro
        row_of_chosen = torch.bucketize(micro.chosen, torch.tensor(micro.lengths).cumsum(0), right=True)
        sampled = micro.old_logprobs.split(torch.bincount(row_of_chosen, minlength=len(rows)).tolist())
        pairs = list(zip(rows, sampled, strict=True))
        return replace(
            micro,
            old_logprobs=torch.cat([self.logprobs.get(row, own) for row, own in pairs]),
            importance=torch.cat([self.importance.get(row, torch.ones_like(own)) for row, own in pairs]),
        )


Rescore = Callable[[RolloutStore, np.ndarray, float, int], Rescored | None]
"""From the rollouts, the rows to train on, the temperature, and the tokens of a micro-batch."""


def no_rescore(store: RolloutStore, rows: np.ndarray, temperature: float, max_tokens: int) -> None:
    """Where the policy's own model sampled, its log-probs are good as they are."""


def rescore(
    store: RolloutStore, rows: np.ndarray, policy: BasePolicy, *, temperature: float, max_tokens: int, cap: float
) -> Rescored:
    """Rate the chosen tokens of `rows` under the present weights, which must be those that sampled.

    Args:
        store: The rollouts.
        rows: Rows in which something was chosen.
        policy: In evaluation mode.
        temperature: The sampling temperature.
        max_tokens: Tokens of a micro-batch.
        cap: Largest importance weight, ≥ 1.
    """
    index = [int(row) for row in rows]
    own: dict[int, torch.Tensor] = {}
    sampled: dict[int, torch.Tensor] = {}
    device = next(policy.parameters()).device
    for cut in cut_by_tokens([int(store.token_counts[row]) for row in index], max_tokens):
        part = [index[i] for i in cut]
        micro = store.micro_batch(part)
        with torch.no_grad():
            logprobs = policy.chosen_logprobs(micro.to(device), temperature)[0].float().cpu()
        counts = [int(store.chosen_counts[row]) for row in part]
        own.update(zip(part, logprobs.split(counts), strict=True))
        sampled.update(zip(part, micro.old_logprobs.split(counts), strict=True))
    correction = truncated_importance(_joined(own, index), _joined(sampled, index), cap=cap)
    weights = correction.weights.split([len(own[row]) for row in index])
    metrics = {f"mismatch/{name}": float(value) for name, value in correction.metrics.items()}
    return Rescored(own, dict(zip(index, weights, strict=True)), metrics)


def _joined(parts: dict[int, torch.Tensor], rows: Sequence[int]) -> torch.Tensor:
    return torch.cat([torch.zeros(0), *(parts[row] for row in rows)])
