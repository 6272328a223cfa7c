"""Keyframes: which earlier turns of an episode are worth showing again.

A rule looks at nothing but the episode itself, so that its choice depends neither on what is played beside it nor on
earlier iterations. Knows states and rewards, not texts or tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple


class PastTurn(NamedTuple):
    """What a rule knows of a turn: the key of the state that it left, of the state that it reached, and its reward."""

    left: Hashable
    reached: Hashable
    reward: float


def anchors(past: Sequence[PastTurn]) -> list[int]:
    """The latest turn that left each state in which the episode has been twice or more, the present one included.

    These are the states that compare: what was tried there is what a choice there must know.
    """
    been = Counter(turn.reached for turn in past)
    been.update(turn.left for turn in past[:1])
    latest = {turn.left: number for number, turn in enumerate(past)}
    return sorted(number for state, number in latest.items() if been[state] > 1)


def changes(past: Sequence[PastTurn]) -> list[int]:
    """The turns that changed the state or earned a reward."""
    return [number for number, turn in enumerate(past) if turn.left != turn.reached or turn.reward != 0]


KEYFRAMES: dict[str, Callable[[Sequence[PastTurn]], list[int]]] = {"anchors": anchors, "changes": changes}
