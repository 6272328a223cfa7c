"""Which tasks of a stage are drawn more often: those of which groups lately won some and lost some.

A group that won or lost as a whole has no spread and teaches nothing. Where a world makes its tasks anew, a task hardly
comes twice; what recurs is its class, such as type and length of the solution. Knows nothing of promotions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gigpo_lightning.curriculum import Stage
from gigpo_lightning.envs.base import Task
from gigpo_lightning.trajectory import Group

# Up to so many tasks each is a class of its own: in a few dozen iterations every one of them has been seen.
FEW_TASKS = 256
CLASS_KNOBS = ("type", "steps")
# The most that p(1 − p) can be: also what is expected of a class that was never played, so that all are tried.
MOST = 0.25
# Added to every estimate: a class that teaches nothing now is drawn at least a sixth as often, or it could not recover.
FLOOR = 0.05
# Weight of the latest group in an estimate.
NEW_SHARE = 0.3
# Draws until a task is taken as it comes. With the floor, the share of such tasks stays below (5/6)³¹ = 0.4 %.
MAX_DRAWS = 32
# Classes that are remembered; those played longest ago are forgotten.
MAX_CLASSES = 2000


class ClassCount(NamedTuple):
    """What the groups of one class did in an iteration; `spread` is the sum of `spread_of` over its `groups`."""

    won: float
    episodes: float
    spread: float
    groups: float


class TaskSignal:
    """An estimate of p(1 − p) inside a group, by class of tasks, and the draw that follows it.

    A group of n members that won k of its episodes has x = k(n − k) / (n(n − 1)), whose expectation is p(1 − p) for
    its task. Estimates start at 1/4 and follow s ← s + 0.3 (x − s). A class's tasks may differ: the estimate is of the
    spread inside groups, not that of the class's pooled rate, which is near 1/2 also where half its tasks are always
    won and half never. A drawn task is kept with the probability `kept` = min(1, (s + 0.05) / 0.3), else another is
    drawn, so that in the end tasks are played in proportion to `kept`.
    """

    def __init__(self) -> None:
        self.estimates: dict[str, float] = {}  # least recently played first

    def kept(self, task_class: str) -> float:
        """The probability with which a drawn task of this class is kept."""
        return min(1.0, (self.estimates.get(task_class, MOST) + FLOOR) / (MOST + FLOOR))

    def draw(self, get: Callable[[], Task], by: Sequence[str] | None, size: int, random: np.random.Generator) -> Task:
        """A task, from a uniform draw `get` of a set of `size` tasks."""
        for _ in range(MAX_DRAWS - 1):
            task = get()
            if random.random() < self.kept(class_of(task, by, size)):
                return task
        return get()

    def update(self, counts: Mapping[str, ClassCount]) -> None:
        """Take an iteration's groups in, classes in the order of their names, so that every process does the same."""
        for name in sorted(counts):
            count = counts[name]
            kept = (1.0 - NEW_SHARE) ** count.groups
            before = self.estimates.pop(name, MOST)
            self.estimates[name] = kept * before + (1.0 - kept) * count.spread / count.groups
        for name in list(self.estimates)[: max(len(self.estimates) - MAX_CLASSES, 0)]:
            del self.estimates[name]

    def uniform_rate(self, counts: Mapping[str, ClassCount]) -> float | None:
        """The success rate as if the tasks had been drawn uniformly: Σ won/kept ÷ Σ episodes/kept.

        Tasks that are always won are drawn less: the plain rate would fall behind the policy, and a promotion with it.
        Call it before `update`: the tasks were drawn with the estimates as they were.
        """
        weights = {name: 1.0 / self.kept(name) for name in counts}
        episodes = sum(count.episodes * weights[name] for name, count in counts.items())
        won = sum(count.won * weights[name] for name, count in counts.items())
        return won / episodes if episodes else None

    def state_dict(self) -> dict[str, float]:
        """The estimates by class."""
        return dict(self.estimates)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Take saved estimates over."""
        self.estimates = dict(state)


def class_of(task: Task, by: Sequence[str] | None, size: int) -> str:
    """The class of a task in a set of `size`: by the knobs `by`; null: the task itself where there are few."""
    if by is None and size <= FEW_TASKS:
        return f"task={task.id}"
    knobs = [knob for knob in CLASS_KNOBS if knob in task.difficulty] if by is None else by
    return ",".join(f"{knob}={_level(task.difficulty[knob])}" for knob in knobs)


def _level(value: Any) -> str:
    """A number > 4 as one of two levels an octave (5–6, 7–9, 10–13, 14–19, …): else there would be too many classes."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 4 < value < math.inf:
        return str(value)
    return f"≈{2 ** (round(2 * math.log2(value)) / 2):.0f}"


def check_classes(stage: Stage, task: Task, size: int) -> None:
    """Refuse classes that the stage's tasks do not have.

    Raises:
        ValueError: The task has no such knob; the message lists those it has.
    """
    if stage.task_choice != "signal" or (stage.signal_by is None and size <= FEW_TASKS):
        return
    knobs, has = stage.signal_by, ", ".join(task.difficulty) or "none"
    if knobs is None and not any(knob in task.difficulty for knob in CLASS_KNOBS):
        raise ValueError(
            f"task_choice: signal needs `signal_by`, a list of knobs: {size} tasks are too many to recur, and they "
            f"have neither `type` nor `steps` (knobs: {has})"
        )
    unknown = [knob for knob in knobs or () if knob not in task.difficulty]
    if unknown:
        raise ValueError(f"signal_by: the tasks have no knob `{unknown[0]}` (knobs: {has})")


def count_classes(classes: Iterable[str], groups: Iterable[Group]) -> dict[str, ClassCount]:
    """The groups of each class; those of class "" were not drawn by signal and are left out."""
    counts: dict[str, ClassCount] = {}
    for name, group in zip(classes, groups, strict=True):
        if name:
            won, members = sum(episode.won for episode in group.episodes), len(group.episodes)
            own = ClassCount(won, members, spread_of(won, members), 1)
            counts[name] = add(counts[name], own) if name in counts else own
    return counts


def add(one: ClassCount, other: ClassCount) -> ClassCount:
    """Both together."""
    return ClassCount(*(a + b for a, b in zip(one, other, strict=True)))


def spread_of(won: int, members: int) -> float:
    """k(n − k) / (n(n − 1)): unbiased for p(1 − p); 0 for a group of one, which has no spread."""
    return won * (members - won) / (members * (members - 1)) if members > 1 else 0.0
