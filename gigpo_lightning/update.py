"""One minibatch's loss over micro-batches and processes: its parts, padding of zero weight, and its figures.

Processes hold different rows, yet each must go through the same number of forward and backward passes. Knows nothing of
Lightning: how a tensor is reduced over processes comes in as a function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gigpo_lightning.batch import MicroBatch, Minibatch, TurnValues
from gigpo_lightning.functional.losses import (
    LossResult,
    TokenWeights,
    entropy_loss,
    kl_loss,
    policy_loss,
    token_weights,
)
from gigpo_lightning.functional.values import value_loss
from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.policy.critic import CriticRule

Reduce = Callable[[Tensor, str], Tensor]  # (tensor, "mean" or "max") → the same on every process
# Parts of the minibatch's loss, which add up; other figures are means over tokens.
_PARTS = ("loss/policy", "loss/value", "loss/value_clip_frac", "loss/total")
_HIGHEST = "loss/ratio_max"


@dataclass(frozen=True, slots=True)
class LossRule:
    """Surrogate, entropy bonus, KL to a reference and value loss; the fields are the options of `GiGPOModule`."""

    clip_low: float
    clip_high: float
    dual_clip: float | None
    kl_coef: float
    aggregation: str
    constant_tokens: float | None
    ratio: str = "token"
    critic: CriticRule | None = None

    def weights(self, micro: MicroBatch) -> TokenWeights:
        """The weight of every chosen token, and what they add to the denominator of the minibatch."""
        every = torch.ones(len(micro.chosen), dtype=torch.bool, device=micro.chosen.device)
        return token_weights(every, micro.turn, self.aggregation, constant=self.constant_tokens)

    def part(
        self,
        policy: BasePolicy,
        reference: BasePolicy,
        micro: MicroBatch,
        temperature: float,
        entropy_coef: float,
        *,
        weights: Tensor,
        denominator: float,
        turns: float = 1.0,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The part of the minibatch's loss that this micro-batch holds, and its figures.

        Args:
            policy: What is trained.
            reference: What the KL is measured against, by its `reference_logprobs`.
            micro: A micro-batch that is not empty.
            temperature: That of sampling.
            entropy_coef: Weight of the entropy bonus.
            weights: Of every chosen token, [N]; a token of weight 0 counts for nothing.
            denominator: Of the whole minibatch.
            turns: Denominator of the value loss, likewise.

        Returns:
            A scalar with gradient, and detached scalars under the names `loss/*`.
        """
        mask = weights > 0
        values = None
        if self.critic is None:
            logprobs, entropy = policy.chosen_logprobs(micro, temperature)
        else:
            logprobs, entropy, values = policy.logprobs_and_values(micro, temperature)
        share: dict[str, Any] = {"denominator": denominator, "weights": weights}
        surrogate = self._surrogate(logprobs, micro, mask, weights, denominator)
        bonus = entropy_loss(entropy, mask, **share)
        loss = surrogate.loss + entropy_coef * bonus.loss
        metrics = {**surrogate.metrics, **bonus.metrics, "policy": surrogate.loss.detach()}
        if self.kl_coef > 0:
            kl = kl_loss(logprobs, reference.reference_logprobs(micro, temperature), mask, **share)
            loss = loss + self.kl_coef * kl.loss
            metrics |= kl.metrics
        if self.critic is not None and values is not None and micro.values is not None:
            value = value_loss(values, micro.values.old, micro.values.targets, clip=self.critic.clip, denominator=turns)
            loss = loss + self.critic.coef * value.loss
            metrics |= value.metrics
        metrics["total"] = loss.detach()
        return loss, {f"loss/{name}": value for name, value in metrics.items()}

    def _surrogate(
        self, logprobs: Tensor, micro: MicroBatch, mask: Tensor, weights: Tensor, denominator: float
    ) -> LossResult:
        """The policy loss; it alone has the importance weights of tokens that another policy or engine sampled."""
        return policy_loss(
            logprobs,
            micro.old_logprobs,
            micro.advantages,
            mask,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
            ratio=self.ratio,
            turn_ids=micro.turn,
            denominator=denominator,
            weights=weights if micro.importance is None else weights * micro.importance,
        )


def padding(device: torch.device) -> tuple[MicroBatch, Tensor]:
    """A row of two tokens, the second chosen among itself alone, and its weight 0: every parameter's gradient is 0."""
    zero, one = torch.zeros(1, dtype=torch.int64, device=device), torch.ones(1, dtype=torch.int64, device=device)
    nothing = torch.zeros(1, dtype=torch.float32, device=device)
    micro = MicroBatch(
        token_ids=torch.zeros(2, dtype=torch.int64, device=device),
        lengths=(2,),
        chosen=one,
        turn=zero,
        old_logprobs=nothing,
        advantages=nothing,
        allowed_ids=zero,
        allowed_counts=one,
        values=TurnValues(zero[:0], nothing[:0], nothing[:0]),
    )
    return micro, nothing


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes that share a minibatch: this one's device, their number, and how a tensor is reduced over them."""

    device: torch.device
    count: int
    reduce: Reduce

    def over_all(self, value: float, how: str) -> float:
        """The mean or the maximum of a number over all processes."""
        return float(self.reduce(torch.tensor(float(value), dtype=torch.float32), how))


def accumulate(
    rule: LossRule,
    policy: BasePolicy,
    reference: BasePolicy,
    batch: Minibatch,
    entropy_coef: float,
    *,
    processes: Processes,
    backward: Callable[[Tensor, bool], None],
) -> dict[str, Tensor]:
    """Add up the gradient of a whole minibatch; returns the figures of its loss, the same everywhere.

    Gradients are averaged over processes: so a denominator is the mean of what the processes' rows add to it.

    Args:
        rule: The loss.
        policy: What is trained.
        reference: What the KL is measured against.
        batch: This process's part of the minibatch.
        entropy_coef: Weight of the entropy bonus.
        processes: Those that share the minibatch.
        backward: Of a part's loss, and whether it is the last part, with which gradients are averaged.
    """
    # Read twice, so that only one at a time is in memory: the denominators must be known before the first is used.
    own_parts, counted, valued = 0, 0.0, 0
    for micro in batch.micro_batches:
        own_parts += not micro.is_empty
        counted += rule.weights(micro).denominator if len(micro.chosen) else 0.0
        valued += 0 if micro.values is None else len(micro.values.states)
    count = int(processes.over_all(own_parts, "max"))
    denominator = max(processes.over_all(counted, "mean"), 1e-9)
    if rule.constant_tokens is not None:
        denominator = rule.constant_tokens / processes.count
    turns = 1.0
    if rule.critic is not None:
        turns = max(processes.over_all(valued, "mean"), 1e-9)
    parts = _filled(rule, batch.micro_batches, count, processes.device)
    figures = LossFigures()
    for number, (micro, weights, tokens) in enumerate(parts, start=1):
        loss, metrics = rule.part(
            policy,
            reference,
            micro,
            batch.temperature,
            entropy_coef,
            weights=weights,
            denominator=denominator,
            turns=turns,
        )
        backward(loss, number == count)
        figures.add(metrics, tokens)
    return figures.over_processes(processes.reduce)


def _filled(
    rule: LossRule, micro_batches: Iterable[MicroBatch], count: int, device: torch.device
) -> Iterator[tuple[MicroBatch, Tensor, int]]:
    """The micro-batches that hold something, then padding, `count` in all, each with the weights [N] of its chosen
    tokens, and their number."""
    number = 0
    for micro in micro_batches:
        if not micro.is_empty:
            yield micro, rule.weights(micro).weights, len(micro.chosen)
            number += 1
    for _ in range(count - number):
        yield *padding(device), 0


class LossFigures:
    """The figures of one minibatch, from those of its micro-batches on all processes."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._sums: dict[str, Tensor] = {}

    def add(self, metrics: dict[str, Tensor], tokens: int) -> None:
        """Count a micro-batch with so many chosen tokens; 0 for padding."""
        self._tokens += tokens
        for name, value in metrics.items():
            before = self._sums.get(name, torch.zeros_like(value))
            if name == _HIGHEST:
                self._sums[name] = torch.maximum(before, value)
            else:
                self._sums[name] = before + (value if name in _PARTS else value * tokens)

    def over_processes(self, reduce: Reduce) -> dict[str, Tensor]:
        """Means over the tokens of all processes, the same on each, which must all ask; empty where nobody had any.

        The parts of the loss are means over processes: as with gradients, the denominator is such a mean.
        """
        if not self._sums:
            return {}
        highest = reduce(self._sums.pop(_HIGHEST), "max")
        names = list(self._sums)
        tokens = highest.new_tensor(self._tokens)
        tokens, *values = reduce(torch.stack([tokens, *[self._sums[name] for name in names]]), "mean").unbind()
        figures = {n: v if n in _PARTS else v / tokens for n, v in zip(names, values, strict=True)}
        return {**figures, _HIGHEST: highest}
