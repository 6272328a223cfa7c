"""The anchor library as a baseline: step advantages of steps that no other step of their group can be compared with.

It changes a finished credit, group by group, so it fits credit in parts. Knows the library by one method only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch

from gigpo_lightning.credit import Credit
from gigpo_lightning.functional.baselines import singleton_advantages
from gigpo_lightning.trajectory import Group

SINGLETON_BASELINES = ("none", "library")


class KnownReturns(NamedTuple):
    """What is known of the returns from some states: visits int64, mean and sample variance float64; else zeros."""

    visits: np.ndarray
    mean: np.ndarray
    variance: np.ndarray


class Library(Protocol):
    """Statistics of anchor states from earlier iterations; the present one is not among them."""

    def look_up(self, task_ids: Sequence[str], anchors: Sequence[str], texts: Sequence[str]) -> KnownReturns:
        """What is known of the states, given by task, anchor key and observation."""


def with_library(credit: Credit, groups: Sequence[Group], library: Library, *, norm: str, share: float) -> Credit:
    """The credit with the library's step advantages where a step group has one member.

    Args:
        credit: The credit of `groups`; step groups of one member have the step advantage 0.
        groups: Whole groups.
        library: What is known.
        norm: As of the step advantages, `std` or `none`.
        share: Factor of the step advantage in the combined one: 1 − λ, or ω.

    Returns:
        The same credit with `step_advantage`, `advantage` and `library_steps` renewed.
    """
    turns = [(group.task_id, turn) for group in groups for episode in group.episodes for turn in episode.turns]
    known = library.look_up(
        [task for task, _ in turns], [str(turn.anchor) for _, turn in turns], [turn.observation for _, turn in turns]
    )
    own = singleton_advantages(credit.step_return - credit.penalties, credit.step_group_ids, *known, norm=norm)
    return replace(
        credit,
        step_advantage=torch.where(own.used, own.advantage, credit.step_advantage),
        advantage=torch.where(own.used, credit.advantage + share * own.advantage, credit.advantage),
        library_steps=int(own.used.sum()),
    )
