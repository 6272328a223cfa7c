"""A foreign engine from its start to its end, and what its log-probs need before they are trained on.

Without one nothing here does anything: the policy's own model samples, and its log-probs are those of the update. Knows
no particular engine.
"""

from __future__ import annotations

import time
from collections.abc import MutableMapping

import numpy as np

from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.policy.engine import Engine
from gigpo_lightning.policy.engine_options import EngineOptions, ForeignEngine
from gigpo_lightning.rollout.collector import ACTION_ROOM_TOKENS
from gigpo_lightning.rollout.rescore import Rescored, rescore
from gigpo_lightning.rollout.store import RolloutStore


class Sampler:
    """The engine that the user chose.

    Attributes:
        options: As given.

    Args:
        options: Which; None for the policy's own model.
    """

    def __init__(self, options: EngineOptions | None):
        self.options = options
        self._engine: ForeignEngine | None = None

    @property
    def is_foreign(self) -> bool:
        """Whether another engine than the policy's own model samples."""
        return self.options is not None

    def check(self, policy: BasePolicy) -> None:
        """Refuse what cannot work, before the policy is prepared.

        Raises:
            ValueError: See `EngineOptions.check`.
        """
        if self.options is not None:
            self.options.check(policy)

    def engine(self, policy: BasePolicy, max_tokens: int, rows: int) -> Engine | None:
        """The engine for segments of at most `max_tokens`, at most `rows` at once; None for the policy's own model."""
        if self._engine is None and self.options is not None:
            self._engine = self.options.make(policy, max_tokens + ACTION_ROOM_TOKENS, rows)
        return self._engine

    def rescore(
        self,
        policy: BasePolicy,
        figures: MutableMapping[str, float],
        store: RolloutStore,
        rows: np.ndarray,
        temperature: float,
        max_tokens: int,
    ) -> Rescored | None:
        """The rows as the policy rates them, still under the weights that sampled; None for its own engine.

        Args:
            policy: In evaluation mode, under the precision of the update.
            figures: Where the `mismatch/*` figures go, and how long it took.
            store: The rollouts; for it and the others see `rescore`.
            rows: The rows that are trained on.
            temperature: The sampling temperature.
            max_tokens: Tokens of a micro-batch.
        """
        if self._engine is None or self.options is None:
            return None
        begin = time.perf_counter()
        cap = self.options.importance_cap
        found = rescore(store, rows, policy, temperature=temperature, max_tokens=max_tokens, cap=cap)
        figures.update(found.metrics)
        figures.update(self._engine.figures)
        figures["time/rescore_s"] = time.perf_counter() - begin
        return found

    def close(self) -> None:
        """Stop the engine."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None
