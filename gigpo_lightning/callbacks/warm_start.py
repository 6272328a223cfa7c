"""Imitation before reinforcement: the policy first learns to do what the expert of the task set does.

Off unless listed in YAML. It runs once, before the first iteration; a resumed run does not repeat it.
"""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.callbacks import Callback

from gigpo_lightning.batch import MicroBatch, cut_by_tokens, pack
from gigpo_lightning.curriculum import Stage
from gigpo_lightning.datamodule import RolloutDataModule
from gigpo_lightning.module import GiGPOModule
from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.policy.finite import not_finite
from gigpo_lightning.policy.tries import TrieCache
from gigpo_lightning.rollout.demonstrations import demonstrate, pack_row
from gigpo_lightning.rollout.plan import generator
from gigpo_lightning.trajectory import Segment

# Tells the random numbers of the warm start from those of rollouts.
_STREAM = 11


class WarmStart(Callback):
    """Imitate the expert's episodes by maximum likelihood under the same constraint as in rollouts.

    The reference policy of the KL penalty, where there is one, is the imitating one.

    Args:
        episodes: Demonstrations, spread evenly over the stages.
        stages: Number of stages, from the first, that are shown; null for all.
        epochs: Passes through the demonstrations.
        batch_episodes: Demonstrations per update.
        lr: Learning rate of the imitation, which has an optimiser of its own.
    """

    def __init__(
        self,
        episodes: int = 1500,
        stages: int | None = None,
        epochs: int = 3,
        batch_episodes: int = 32,
        lr: float = 3e-3,
    ):
        for name, value in (("episodes", episodes), ("epochs", epochs), ("batch_episodes", batch_episodes)):
            if value < 1:
                raise ValueError(f"WarmStart.{name}={value}: must be at least 1; to switch it off, leave WarmStart out")
        if stages is not None and stages < 1:
            raise ValueError(f"WarmStart.stages={stages}: must be at least 1, or null for all")
        if not 0 < lr < math.inf:
            raise ValueError(f"WarmStart.lr={lr}: must be positive, 0.003 is usual")
        self.episodes, self.stages, self.epochs = episodes, stages, epochs
        self.batch_episodes, self.lr = batch_episodes, lr
        self.done = False

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.done = bool(state_dict["done"])

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Imitate, unless a resumed run has done so."""
        if self.done:
            return
        data = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, RolloutDataModule):
            raise TypeError(f"WarmStart needs a RolloutDataModule; the trainer's datamodule is {type(data).__name__}")
        if not isinstance(pl_module, GiGPOModule):
            raise TypeError(f"WarmStart needs a GiGPOModule; the trainer's module is {type(pl_module).__name__}")
        data.check_fit()  # before the imitation, which may take minutes
        losses = self.imitate(data.policy, self._demonstrations(data), data.max_tokens_per_batch, data.seed)
        pl_module.renew_reference()
        rank_zero_info(f"WarmStart: {self.epochs} epochs, loss {losses[0]:.3f} → {losses[-1]:.3f}")
        self.done = True

    def _demonstrations(self, data: RolloutDataModule) -> list[tuple[Segment, ...]]:
        """Won episodes of the expert on training tasks."""
        stages = data.controls.stages[: self.stages] or (data.stage,)
        tries, expert, env = TrieCache(data.policy.prompt), data.tasks.make_expert(), data.tasks.make_env()
        random = generator(_STREAM, data.seed)
        shown = []
        for number in range(self.episodes):
            stage: Stage = stages[number % len(stages)]
            tasks = data.stage_tasks(stage)
            task = tasks.get("train", int(random.integers(tasks.len("train"))))
            segments = demonstrate(
                data.policy, tries, env, expert, data.segment_rule, task, stage.max_turns, data.max_action_tokens
            )
            if segments:
                shown.append(segments)
        env.close()
        if not shown:
            raise ValueError("WarmStart: the expert won no training task within the turn limits; leave WarmStart out")
        return shown

    def imitate(self, policy: BasePolicy, shown: list[tuple[Segment, ...]], max_tokens: int, seed: int) -> list[float]:
        """Minimise −log p of the expert's choices; returns the mean loss of every epoch, in nats per choice.

        Raises:
            ValueError: There is nothing to choose, or the loss or a weight is not finite.
        """
        optimizer = torch.optim.AdamW(policy.parameters(), lr=self.lr, weight_decay=0.0)
        device = next(policy.parameters()).device
        random = generator(_STREAM, seed, 1)
        losses = []
        with torch.enable_grad():
            for _ in range(self.epochs):
                total, count = 0.0, 0
                order = random.permutation(len(shown))
                for start in range(0, len(order), self.batch_episodes):
                    rows = [s for i in order[start : start + self.batch_episodes] for s in shown[i]]
                    micro = _micro_batches(rows, max_tokens)
                    chosen = sum(len(m.chosen) for m in micro)
                    if not chosen:  # every action of these episodes was the only one allowed
                        continue
                    optimizer.zero_grad()
                    for batch in micro:
                        logprobs, _ = policy.chosen_logprobs(batch.to(device), 1.0)
                        loss = -logprobs.sum() / chosen
                        loss.backward()
                        total += float(loss.detach()) * chosen
                    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
                    optimizer.step()
                    count += chosen
                if not count:
                    raise ValueError(
                        "WarmStart: the expert's episodes have no choice to learn from; leave WarmStart out"
                    )
                losses.append(total / count)
                if not math.isfinite(total) or not_finite(policy.named_parameters()):
                    raise ValueError(
                        f"WarmStart.lr={self.lr}: the imitation went to numbers that are not finite; lower it"
                    )
        return losses


def _micro_batches(rows: list[Segment], max_tokens: int) -> list[MicroBatch]:
    packed = [pack_row(segment, 1.0) for segment in rows if any(segment.response_mask)]
    cuts = cut_by_tokens([len(row.token_ids) for row in packed], max_tokens)
    return [pack([packed[i] for i in cut]) for cut in cuts]
