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
from gigpo_lightning.optimizers import check_resumed, described, made
from gigpo_lightning.placement import check_optimizer, check_strategy, settle_precision
from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.policy.default_type import float32_by_default
from gigpo_lightning.policy.finite import not_finite
from gigpo_lightning.policy.identity import check_same_policy, identity_of
from gigpo_lightning.rollout.collector import EpisodeJob
from gigpo_lightning.rollout.evaluation import EvaluationBatch, outcomes, summarise
from gigpo_lightning.rollout.options import check_loss, check_updates
from gigpo_lightning.rollout.transcript import transcript
from gigpo_lightning.sharding import own_part, shard, whole
from gigpo_lightning.update import LossFigures, LossRule, padding

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
        kl_coef: Weight of the k3 KL to the reference: a frozen copy of the initial policy (0 keeps none), or with LoRA
            the same weights with the adapter off.
        aggregation: `token`, `turn` or `constant`.
        constant_tokens: Denominator of `constant`, in tokens of a minibatch over all processes.
        gradient_clip: Largest gradient norm; null for no clipping.
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
        kl_coef: float = 0.01,
        aggregation: str = "token",
        constant_tokens: float | None = None,
        gradient_clip: float | None = 1.0,
        max_bad_updates: int = 5,
    ):
        super().__init__()
        self.automatic_optimization = False
        check_loss(clip_low, clip_high, dual_clip, kl_coef, aggregation, constant_tokens)
        check_updates(gradient_clip, max_bad_updates)
        self.policy = policy
        self.reference: BasePolicy | None = None
        self._optimizer, self._lr_scheduler = optimizer, lr_scheduler
        self.loss = LossRule(clip_low, clip_high, dual_clip, kl_coef, aggregation, constant_tokens)
        self.gradient_clip, self.max_bad_updates = gradient_clip, max_bad_updates
        self._bad_updates = 0
        self._saved_optimizer: dict[str, Any] | None = None  # that of the checkpoint which the run goes on from
        self.results: list[dict[str, Any]] = []

    # -- set-up --------------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        settle_precision(self.trainer.strategy)
        if stage == "fit":
            check_strategy(self.trainer.strategy)

    def configure_model(self) -> None:
        with float32_by_default():
            self.policy.prepare(self.trainer.datamodule.tasks)  # type: ignore[attr-defined]
        fitting = self.trainer.state.fn == TrainerFn.FITTING
        if fitting and self.loss.kl_coef > 0 and self.reference is None:
            self.reference = self.policy.make_reference()
        if self.device_mesh is not None:
            for policy in [p for p in (self.policy, self.reference) if p is not None]:
                shard(policy, self.device_mesh["data_parallel"])

    def renew_reference(self) -> None:
        """Take the present policy as the reference: reinforcement starts here. One without a copy stays what it was."""
        if self.reference is not None:
            self.reference.load_state_dict(self.policy.state_dict())
        elif self.loss.kl_coef > 0:
            rank_zero_warn("with LoRA the reference of model.kl_coef stays the pretrained model, not the imitating one")

    def configure_optimizers(self) -> Any:
        optimizer = made(self._optimizer, [p for p in self.policy.parameters() if p.requires_grad])
        for name, value in optimizer.defaults.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"model.optimizer: {name}={value} is not a finite number")
        check_optimizer(optimizer, self._optimizer, self.device)
        check_resumed(optimizer, self._saved_optimizer)
        if self._lr_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self._lr_scheduler(optimizer)}

    # -- update --------------------------------------------------------------------------------------------------------

    def training_step(self, batch: Minibatch, batch_idx: int) -> None:
        begin = time.perf_counter()
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        optimizer.zero_grad()
        figures = self._backward(batch)
        if batch_idx > 0:  # the weights are no longer those that sampled
            figures.pop("loss/mismatch", None)
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.gradient_clip or float("inf"))
        figures["loss/gradient_norm"] = whole(norm.detach())
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

    def _backward(self, batch: Minibatch) -> dict[str, Tensor]:
        """Accumulate the gradient of the whole minibatch; returns the figures of its loss, the same everywhere."""
        own = [(micro, self.loss.weights(micro)) for micro in batch.micro_batches if len(micro.chosen)]
        denominator, count = self._agree(sum(weights.denominator for _, weights in own), len(own))
        entropy_coef = self.trainer.datamodule.controls.entropy_coef  # type: ignore[attr-defined]
        parts = [(micro, weights.weights, len(micro.chosen)) for micro, weights in own]
        parts += [(*padding(self.device), 0)] * (count - len(own))
        figures = LossFigures()
        for number, (micro, weights, tokens) in enumerate(parts, start=1):
            loss, metrics = self.loss.part(
                self.policy,
                self.reference or self.policy,
                micro,
                batch.temperature,
                entropy_coef,
                weights=weights,
                denominator=denominator,
            )
            # Each operation's gradient is of the type that the operation had, without autocast.
            with self._sync(number == count), torch.autocast(self.device.type, enabled=False):
                self.manual_backward(loss)
            figures.add(metrics, tokens)
        return figures.over_processes(self._reduce)

    def _agree(self, own_denominator: float, own_count: int) -> tuple[float, int]:
        """The denominator of the minibatch, and the number of micro-batches that every process goes through.

        Gradients are averaged over processes: so the denominator is the mean of what the processes' rows add to it.
        """
        count = int(self._reduce(torch.tensor(float(own_count), dtype=torch.float32), "max"))
        mean = float(self._reduce(torch.tensor(float(own_denominator), dtype=torch.float32), "mean"))
        if self.loss.constant_tokens is not None:
            mean = self.loss.constant_tokens / self.trainer.world_size
        return max(mean, 1e-9), count

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
        jobs, world = self._share(batch), self.trainer.world_size
        played = outcomes(jobs, self.trainer.datamodule.play(jobs, batch.temperature))  # type: ignore[attr-defined]
        if world > 1:
            parts: list[Any] = [None] * world
            torch.distributed.all_gather_object(parts, played)
            played = [outcome for part in parts for outcome in part]
        row = summarise(batch, played)
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
        weights = checkpoint.get("state_dict", {})  # none where a strategy has loaded them itself
        broken = not_finite(weights.items())
        if broken:
            raise ValueError(f"the checkpoint cannot be used: its weight {broken} is not finite; take an earlier one")
        self._bad_updates = int(checkpoint.get("bad_updates", 0))
        self._saved_optimizer = checkpoint.get("optimizer")
        if weights:
            self._settle_reference(weights)

    def _settle_reference(self, weights: dict[str, Any]) -> None:
        """Evaluations need no reference; a fit goes on with the one of the checkpoint."""
        saved = [name for name in weights if name.startswith("reference.")]
        if self.trainer.state.fn == TrainerFn.FITTING and bool(saved) != (self.reference is not None):
            raise ValueError(
                f"model.kl_coef={self.loss.kl_coef}, but the checkpoint holds {'a' if saved else 'no'} reference "
                f"policy: resume with {'a positive kl_coef' if saved else 'kl_coef 0'}, or start without ckpt_path"
            )
        if self.reference is None:
            for name in saved:
                del weights[name]
