"""Tables of turns for tests of detectors, written shortly, and partitions, which do not depend on the numbering."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gigpo_lightning.detectors import TurnTable
from gigpo_lightning.trajectory import Turn


def make_turn(key: str = "", observation: str = "", action: str = "", reward: float = 0.0) -> Turn:
    return Turn(observation, action, reward, key, valid=True, admissible=True, tokens=1)


def make_table(
    turns: Sequence[Turn],
    groups: Sequence[int] | None = None,
    tasks: Sequence[str] | None = None,
    embed: Callable[[Sequence[str]], torch.Tensor] | None = None,
) -> TurnTable:
    """All in one group of one task unless said otherwise; by default the task of group g is called `task g`."""
    ids = [0] * len(turns) if groups is None else list(groups)
    return TurnTable(
        turns=turns,
        group_ids=torch.tensor(ids, dtype=torch.int64),
        task_ids=[f"task {g}" for g in ids] if tasks is None else tasks,
        instructions=[""] * len(turns),
        embed=embed,
    )


def of_keys(*keys: str, groups: Sequence[int] | None = None, tasks: Sequence[str] | None = None) -> TurnTable:
    return make_table([make_turn(key) for key in keys], groups, tasks)


def of_texts(*texts: str, groups: Sequence[int] | None = None) -> TurnTable:
    return make_table([make_turn(observation=text) for text in texts], groups)


def partition(step_groups: torch.Tensor) -> set[frozenset[int]]:
    return {frozenset((step_groups == group).nonzero().flatten().tolist()) for group in step_groups.unique()}


def pairs(step_groups: torch.Tensor) -> set[frozenset[int]]:
    """The step groups of two turns and more."""
    return {members for members in partition(step_groups) if len(members) > 1}


def alone(own: Any) -> list[Any]:
    """What one process gathers."""
    return [own]
