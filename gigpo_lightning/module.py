"""The LightningModule: a policy, the grouped PPO loss and an optimiser.

What is sampled and how it is credited is the datamodule's; this file turns minibatches into updates. Optimisation is
manual, so that a minibatch of any size is cut into micro-batches with one global denominator, over all processes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gigpo_lightning.batch import Minibatch
from gigpo_lightning.optimizers import check_resumed, check_scheduled, described, made
from gigpo_lightning.placement import check_optimizer, check_strategy, settle_precision
from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.policy.critic import CriticRule
from gigpo_lightning.policy.default_type import float32_by_default
from gigpo_lightning.policy.finite import not_finite
from gigpo_lightning.policy.identity import check_same_policy, identity_of
from gigpo_lightning.resumption import settle_weights
from gigpo_lightning.rollout.collector import EpisodeJob
from gigpo_lightning.rollout.evaluation import EvaluationBatch, outcomes, summarise
from gigpo_lightning.rollout.options import check_critic, check_loss, check_updates
from gigpo_lightning.rollout.processes import gathered
from gigpo_lightning.rollout.transcript import transcript
from gigpo_lightning.sharding import own_part, shard, whole
from gigpo_lightning.update import LossRule, Processes, accumulate

OptimizerFactory = Callable[[Iterable[Tensor]], Optimizer]
SchedulerFactory = Callable[[Optimizer], LRScheduler]


class GiGPOModule(pl.LightningModule):
    """Trains a policy on credited rollouts.

    Args:
        policy: The language model that acts.
        optimizer: Optimiser of the policy's parameters.
        lr_scheduler: Learning-rate schedule, stepped after every update.
        clip_low: ε_low of the clipped surrogate, in [0, 1).
        clip_high: ε_high of the clipped surrogate.
        dual_clip: Lower bound c of the objective where the advantage is negative, > 1; null for none.
        ratio: Of the surrogate: `token`, `sequence` (GSPO: one for all tokens of a turn) or `none` (the plain policy
            gradient, which clips nothing).
        kl_coef: Weight of the k3 KL to the reference: a frozen copy of the initial policy (0 keeps none), or with LoRA
            the same weights with the adapter off.
        aggregation: `token`, `turn` or `constant`.
        constant_tokens: Denominator of `constant`, in tokens of a minibatch over all processes.
        critic: Value head for the estimators ppo and a2c; null for none.
        gradient_clip: Largest gradient norm, of the value head by itself; null for no clipping.
        max_bad_updates: Non-finite updates in a row after which the run stops.
    """

    def __init__(
        self,
        policy: BasePolicy,
        optimizer: OptimizerFactory = torch.optim.AdamW,
        lr_scheduler: SchedulerFactory | None = None,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        ratio: str = "token",
        kl_coef: float = 0.01,
        aggregation: str = "token",
        constant_tokens: float | None = None,
        critic: CriticRule | None = None,
        gradient_clip: float | None = 1.0,
        max_bad_updates: int = 5,
    ):
        super().__init__()
        self.automatic_optimization = False
        check_loss(clip_low, clip_high, dual_clip, kl_coef, aggregation, constant_tokens, ratio)
        check_updates(gradient_clip, max_bad_updates)
        self.policy = policy
        self.reference: BasePolicy | None = None
        self._optimizer, self._lr_scheduler = optimizer, lr_scheduler
        self.loss = LossRule(clip_low, clip_high, dual_clip, kl_coef, aggregation, constant_tokens, ratio, critic)
        self.gradient_clip, self.max_bad_updates = gradient_clip, max_bad_updates
        self._bad_updates = 0
        self._saved_optimizer: dict[str, Any] | None = None  # that of the checkpoint which the run goes on from
        self.results: list[dict[str, Any]] = []

    # -- set-up --------------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        settle_precision(self.trainer.strategy)
        if stage == "fit":
            check_strategy(self.trainer.strategy)
            data = self.trainer.datamodule  # type: ignore[attr-defined]
            check_critic(self.loss.critic, data.crediting.rule, data.skip_zero_advantage)

    def configure_model(self) -> None:
        with float32_by_default():
            self.policy.prepare(self.trainer.datamodule.tasks)  # type: ignore[attr-defined]
        fitting = self.trainer.state.fn == TrainerFn.FITTING
        if fitting and self.loss.kl_coef > 0 and self.reference is None:
            self.reference = self.policy.make_reference()
        if fitting and self.loss.critic is not None:
            self.policy.add_critic(self.loss.critic.detach)
        if self.device_mesh is not None:
            for policy in [p for p in (self.policy, self.reference) if p is not None]:
                shard(policy, self.device_mesh["data_parallel"])

    def renew_reference(self) -> None:
        """Take the present policy as the reference: reinforcement starts here. One without a copy stays what it was."""
        if self.reference is not None:
            self.reference.load_state_dict(self.policy.state_dict_without_critic())
        elif self.loss.kl_coef > 0:
            rank_zero_warn("with LoRA the reference of model.kl_coef stays the pretrained model, not the imitating one")

    def configure_optimizers(self) -> Any:
        head_lr = None if self.loss.critic is None else self.loss.critic.lr
        optimizer = made(self._optimizer, list(self.policy.trained_parts().values()), head_lr)
        for name, value in optimizer.defaults.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"model.optimizer: {name}={value} is not a finite number")
        check_optimizer(optimizer, self._optimizer, self.device)
        check_resumed(optimizer, self._saved_optimizer)
        if self._lr_scheduler is None:
            return optimizer
        scheduler = self._lr_scheduler(optimizer)
        check_scheduled(optimizer, head_lr)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    # -- update --------------------------------------------------------------------------------------------------------

    def training_step(self, batch: Minibatch, batch_idx: int) -> None:
        begin = time.perf_counter()
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        optimizer.zero_grad()
        figures = accumulate(
            self.loss,
            self.policy,
            self.reference or self.policy,
            batch,
            self.trainer.datamodule.controls.entropy_coef,  # type: ignore[attr-defined]
            processes=Processes(self.device, self.trainer.world_size, self._reduce),
            backward=self._backward,
        )
        if batch_idx > 0:  # the weights are no longer those that sampled
            figures.pop("loss/mismatch", None)
        for name, part in self.policy.trained_parts().items():
            norm = torch.nn.utils.clip_grad_norm_(part, self.gradient_clip or float("inf"))
            figures[f"loss/{name}gradient_norm"] = whole(norm.detach())
        if self._finite(figures):
            optimizer.step()
            self._check_weights()
            scheduler = self.lr_schedulers()
            if scheduler is not None and not isinstance(scheduler, list):
                scheduler.step()
        else:
            optimizer.zero_grad()
        # The views log these under the iteration; the logger would put them under the optimiser step.
        self.log_dict(figures, on_step=False, on_epoch=True, batch_size=1, logger=False)
        self._sum("time/update_s", time.perf_counter() - begin)

    def _sum(self, name: str, value: float) -> None:
        """Log a figure that adds up over the updates of an iteration."""
        self.log(name, value, on_step=False, on_epoch=True, reduce_fx="sum", batch_size=1, logger=False)

    def _backward(self, loss: Tensor, last: bool) -> None:
        # Each operation's gradient is of the type that the operation had, without autocast.
        with self._sync(last), torch.autocast(self.device.type, enabled=False):
            self.manual_backward(loss)

    def _reduce(self, tensor: Tensor, how: str) -> Tensor:
        return self.trainer.strategy.reduce(tensor.to(self.device), reduce_op=how)

    def _sync(self, last: bool) -> AbstractContextManager[Any]:
        """Gradients are averaged over processes once, with the last micro-batch; till then they stay with theirs."""
        strategy = self.trainer.strategy
        return strategy.block_backward_sync() if isinstance(strategy, ParallelStrategy) and not last else nullcontext()

    def _finite(self, figures: dict[str, Tensor]) -> bool:
        """Whether the update may be made, the same on every process; several in a row that may not stop the run."""
        good = bool(torch.stack([v.float() for v in figures.values()]).isfinite().all())
        self._bad_updates = 0 if good else self._bad_updates + 1
        self._sum("loss/skipped_updates", float(not good))
        if self._bad_updates >= self.max_bad_updates:
            raise RuntimeError(
                f"{self._bad_updates} updates in a row were not finite (max_bad_updates={self.max_bad_updates}): lower "
                f"the learning rate or gradient_clip; {self._last_checkpoint()}"
            )
        for name in [n for n, v in figures.items() if not v.isfinite()]:
            del figures[name]
        return good

    def _check_weights(self) -> None:
        """Stop before weights that can no longer be used are written. The gradient was finite, so a step was too large.

        Raises:
            ValueError: A weight is not finite.
        """
        broken = not_finite((name, own_part(weight)) for name, weight in self.policy.named_parameters())
        if self._reduce(torch.tensor(float(bool(broken)), dtype=torch.float32), "max"):
            raise ValueError(
                "model.optimizer: the step made weights that are not finite; lower the learning rate, or check "
                f"lr_scheduler; {self._last_checkpoint()}"
            )

    def _last_checkpoint(self) -> str:
        last = getattr(self.trainer.checkpoint_callback, "last_model_path", "")
        return f"the last good checkpoint: {last or 'none was written'}"

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        self.results = []

    on_test_start = on_validation_start

    def validation_step(self, batch: EvaluationBatch, batch_idx: int) -> None:
        row = self._evaluate(batch)
        for name in ("success", "length", "well_formed"):
            self.log(f"val/{batch.stage}/{name}", row[name], batch_size=1, logger=False)

    def test_step(self, batch: EvaluationBatch, batch_idx: int) -> None:
        row = self._evaluate(batch)
        name = f"test/{batch.stage}/{batch.split}/{batch.mode}"
        self.log(f"{name}/success", row["success"], batch_size=1, logger=False)

    def predict_step(self, batch: EvaluationBatch, batch_idx: int) -> list[str]:
        """Transcripts of the played episodes."""
        jobs = self._share(batch)
        episodes = self.trainer.datamodule.play(jobs, batch.temperature)  # type: ignore[attr-defined]
        return [transcript(episode) for episode in episodes]

    def _evaluate(self, batch: EvaluationBatch) -> dict[str, Any]:
        """Play the batch, each process its share; adds the row over all processes to `results`."""
        jobs = self._share(batch)
        own = outcomes(jobs, self.trainer.datamodule.play(jobs, batch.temperature))  # type: ignore[attr-defined]
        row = summarise(batch, [outcome for part in gathered(own, self.trainer.world_size) for outcome in part])
        self.results.append(row)
        return row

    def _share(self, batch: EvaluationBatch) -> list[EpisodeJob]:
        """The jobs that this process plays."""
        return list(batch.jobs[self.global_rank :: self.trainer.world_size])

    # -- checkpoint ----------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["policy_identity"] = identity_of(self.policy)
        checkpoint["bad_updates"] = self._bad_updates
        checkpoint["optimizer"] = described(self.trainer.optimizers[0]) if self.trainer.optimizers else None

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        check_same_policy(checkpoint.get("policy_identity"), self.policy)
        self._bad_updates = int(checkpoint.get("bad_updates", 0))
        self._saved_optimizer = checkpoint.get("optimizer")
        weights = checkpoint.get("state_dict", {})  # none where a strategy has loaded them itself
        if weights:
            settle_weights(
                weights,
                fitting=self.trainer.state.fn == TrainerFn.FITTING,
                has_reference=self.reference is not None,
                kl_coef=self.loss.kl_coef,
                has_critic=self.policy.critic is not None,
            )
