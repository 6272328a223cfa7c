"""What one optimiser step is computed from: rows of tokens, packed without padding, cut into micro-batches.

Knows nothing about policies or environments. Masks are True where a token counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

Part = TypeVar("Part")


class TurnValues(NamedTuple):
    """What a critic learns from K turns.

    `states`: int64 [K], the index in `token_ids` of the last token before each turn's answer; `old`: float32 [K], what
    the critic said before the first update; `targets`: float32 [K], what it should say.
    """

    states: Tensor
    old: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Whole rows, laid end to end; only chosen tokens have an entry in the `[N]` tensors.

    Attributes:
        token_ids: int64 [T], all rows end to end.
        lengths: tokens of each row, T = their sum.
        chosen: int64 [N], the index in `token_ids` of every token that the policy chose.
        turn: int64 [N], a number for the turn of each chosen token, unique within the micro-batch.
        old_logprobs: float32 [N], as the sampling policy assigned them.
        advantages: float32 [N], the advantage of the token's turn.
        allowed_ids: int64 [M], the allowed ids of every chosen token, concatenated.
        allowed_counts: int64 [N], their numbers, 0 where the whole vocabulary was allowed; None if it was for all.
        importance: float32 [N], weights of the policy loss where another engine or policy sampled; None for 1.
        values: Of all turns of the rows; None without a critic.
    """

    token_ids: Tensor
    lengths: tuple[int, ...]
    chosen: Tensor
    turn: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    allowed_ids: Tensor
    allowed_counts: Tensor | None
    importance: Tensor | None = None
    values: TurnValues | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing in it is trained on."""
        return not len(self.chosen) and (self.values is None or not len(self.values.states))

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same micro-batch on another device."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {k: v.to(device) for k, v in values.items() if isinstance(v, Tensor)}
        if self.values is not None:
            moved["values"] = TurnValues(*(part.to(device) for part in self.values))
        return replace(self, **moved)


class PackRow(NamedTuple):
    """One segment as arrays: the fields of `trajectory.Segment`, turns counted from 0, with `advantages` per turn.

    `values` and `value_targets` are per turn, too; these and `answer_starts` are None where no critic is trained.
    """

    token_ids: np.ndarray
    response_mask: np.ndarray
    turn_index: np.ndarray
    logprobs: np.ndarray
    allowed_ids: np.ndarray
    allowed_counts: np.ndarray
    advantages: np.ndarray
    answer_starts: np.ndarray | None = None
    values: np.ndarray | None = None
    value_targets: np.ndarray | None = None


def pack(rows: Sequence[PackRow]) -> MicroBatch:
    """Lay rows end to end. An advantage goes to the tokens of its own turn, and to no other."""
    chosen, turn, advantages = [], [], []
    offset = turn_offset = 0
    where = [np.flatnonzero(row.response_mask) for row in rows]
    for row, index in zip(rows, where, strict=True):
        local = row.turn_index[index]
        chosen.append(index + offset)
        turn.append(local + turn_offset)
        advantages.append(row.advantages[local])
        offset += len(row.token_ids)
        turn_offset += len(row.advantages)
    counts = _join([row.allowed_counts for row in rows], np.int64)
    return MicroBatch(
        token_ids=_join([row.token_ids for row in rows], np.int64),
        lengths=tuple(len(row.token_ids) for row in rows),
        chosen=_join(chosen, np.int64),
        turn=_join(turn, np.int64),
        old_logprobs=_join([row.logprobs[index] for row, index in zip(rows, where, strict=True)], np.float32),
        advantages=_join(advantages, np.float32),
        allowed_ids=_join([row.allowed_ids for row in rows], np.int64),
        allowed_counts=counts if counts.any() else None,
        values=_pack_values(rows),
    )


def _pack_values(rows: Sequence[PackRow]) -> TurnValues | None:
    """The values of all turns of all rows, or None where the rows have none."""
    if not any(row.values is not None for row in rows):
        return None
    lengths = [len(row.token_ids) for row in rows]
    offsets = np.cumsum([0, *lengths[:-1]])
    states, old, targets = [], [], []
    for row, offset in zip(rows, offsets, strict=True):
        if row.values is not None and row.value_targets is not None and row.answer_starts is not None:
            # A prompt that nothing answers has no target: it comes after the turns.
            states.append(row.answer_starts[: len(row.values)] - 1 + offset)
            old.append(row.values)
            targets.append(row.value_targets)
    return TurnValues(_join(states, np.int64), _join(old, np.float32), _join(targets, np.float32))


def _join(parts: Sequence[np.ndarray], kind: type) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(kind) if parts else np.zeros(0, kind))


class LazyMicroBatches(Sequence[MicroBatch]):
    """Micro-batches that are made anew whenever they are asked for: none is kept.

    Args:
        make: Makes one.
        parts: What `make` is given, for each.
    """

    def __init__(self, make: Callable[[Part], MicroBatch], parts: Sequence[Part]):
        self._make, self._parts = make, parts

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: int) -> MicroBatch:  # type: ignore[override]
        return self._make(self._parts[index])


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The micro-batches of one optimiser step.

    Attributes:
        micro_batches: Empty where this process has fewer rows than minibatches: padding of zero weight. However many
            episodes there are, only the one in work need be in memory.
        temperature: The sampling temperature, which the log-probs are computed at.
    """

    micro_batches: Sequence[MicroBatch]
    temperature: float

    def to(self, device: torch.device | str, **_: Any) -> Minibatch:
        """The same minibatch; each micro-batch goes to the other device when it is asked for."""
        return replace(self, micro_batches=LazyMicroBatches(lambda micro: micro.to(device), self.micro_batches))


def cut_by_tokens(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of rows sorted by length and cut so that each part holds at most `max_tokens` tokens, padding included.

    A row longer than `max_tokens` makes a part of its own. Parts of like lengths waste little in padded attention.
    """
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    parts: list[list[int]] = []
    for i in order:
        if parts and lengths[i] * (len(parts[-1]) + 1) <= max_tokens:
            parts[-1].append(i)
        else:
            parts.append([i])
    return parts
