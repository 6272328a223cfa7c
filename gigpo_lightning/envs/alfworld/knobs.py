"""The difficulty knobs of generated tasks: which there are, what they accept, and what to say when they conflict."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from gigpo_lightning.envs.alfworld.goals import TASK_TYPES
from gigpo_lightning.envs.alfworld.rooms import ROOMS
from gigpo_lightning.suggest import did_you_mean

Range = tuple[float, float]


def inside(value: float, bounds: Range | None) -> bool:
    """Whether `value` lies in `bounds`, both ends included; None allows everything."""
    return bounds is None or bounds[0] <= value <= bounds[1]


@dataclass(frozen=True)
class Knobs:
    """The ranges that a task's difficulty must lie in; None where anything goes.

    Attributes:
        types: Task types.
        rooms: Kinds of room.
        receptacles: Number of receptacles.
        steps: Length of the text-only explorer's solution.
        oracle_steps: Length of the shortest solution.
        objects: Number of things that can be picked up.
        hidden: Share of the receptacles that start closed.
        target_hidden: 1 where a wanted object starts in a closed receptacle.
    """

    types: tuple[str, ...] = TASK_TYPES
    rooms: tuple[str, ...] = ROOMS
    receptacles: tuple[int, int] = (2, 44)
    steps: tuple[int, int] | None = None
    oracle_steps: tuple[int, int] | None = None
    objects: tuple[int, int] | None = None
    hidden: Range | None = None
    target_hidden: tuple[int, int] | None = None

    @classmethod
    def unlimited(cls) -> Knobs:
        """No range at all, for games that are as they are."""
        return cls(receptacles=(0, 1000))

    def narrow(self, difficulty: Mapping[str, Any]) -> Knobs:
        """These knobs, narrowed further.

        Args:
            difficulty: Knob name to a value, a list of allowed values (`type`, `room`) or `[low, high]`.

        Raises:
            ValueError: An unknown knob, a malformed value, or nothing left.
        """
        if not isinstance(difficulty, Mapping):
            raise ValueError(f"difficulty must be a mapping of knobs to values; got {difficulty!r}")
        knobs = self
        for name, value in difficulty.items():
            knobs = knobs._narrow_one(name, value)
        return knobs

    def _narrow_one(self, name: str, value: Any) -> Knobs:
        changed: dict[str, Any]
        if name in _CHOICES:
            attribute, allowed = _CHOICES[name]
            chosen = _choice(name, value, allowed)
            changed = {attribute: tuple(one for one in getattr(self, attribute) if one in chosen)}
            empty = not changed[attribute]
        elif name in _RANGES:
            low, high = _range(name, value)
            present = getattr(self, name) or (low, high)
            changed = {name: (max(low, present[0]), min(high, present[1]))}
            empty = changed[name][0] > changed[name][1]
        else:
            known = sorted((*_CHOICES, *_RANGES))
            hint = did_you_mean(str(name), known, quote="'")
            raise ValueError(f"difficulty has no knob {name!r}; known knobs: {', '.join(known)}{hint}")
        if empty:
            raise ValueError(f"difficulty {name}: {value!r} leaves no task: {name} is already {self.value(name)}")
        return replace(self, **changed)

    def feasible_types(
        self, fewest_steps: Mapping[str, int], rooms: Mapping[str, tuple[str, ...]], room: str | None
    ) -> list[str]:
        """The task types that some room in question allows and that are not longer than asked for.

        Args:
            fewest_steps: The least number of steps by task type.
            rooms: The kinds of room by task type.
            room: The kind of room if it is already decided.

        Raises:
            ValueError: There is none.
        """
        allowed = (room,) if room else self.rooms
        limit = min(bounds[1] for bounds in (self.steps, self.oracle_steps, (0, 10**9)) if bounds)
        found = [one for one in self.types if fewest_steps[one] <= limit and set(rooms[one]) & set(allowed)]
        if not found:
            raise ValueError(self.conflict(["type", "steps" if limit < 10**9 else "room"]))
        return found

    def conflict(self, names: Sequence[str]) -> str:
        """The message that no task fits the knobs `names`."""
        shown = ", ".join(f"{name}: {self.value(name)}" for name in dict.fromkeys(names))
        return f"no task fits these difficulty knobs together: {shown}; widen one of them"

    def value(self, name: str) -> Any:
        """The value of the knob `name` as a user would write it."""
        value = getattr(self, _CHOICES[name][0] if name in _CHOICES else name)
        return list(value) if value is not None else "any"

    def key(self) -> str:
        """A text that is equal for equal knobs only; the same on every machine."""
        return json.dumps({field.name: getattr(self, field.name) for field in fields(self)}, sort_keys=True)


_CHOICES: dict[str, tuple[str, tuple[str, ...]]] = {"type": ("types", TASK_TYPES), "room": ("rooms", ROOMS)}
# Numeric knobs with their least and greatest sensible values and whether they are whole numbers.
_RANGES: dict[str, tuple[float, float, bool]] = {
    "receptacles": (2, 44, True),
    "steps": (3, 200, True),
    "oracle_steps": (3, 60, True),
    "objects": (1, 200, True),
    "hidden": (0.0, 1.0, False),
    "target_hidden": (0, 1, True),
}


def _choice(name: str, value: Any, allowed: tuple[str, ...]) -> tuple[str, ...]:
    chosen = (value,) if isinstance(value, str) else value
    if not isinstance(chosen, Sequence) or not chosen:
        raise ValueError(f"difficulty {name} must be one of or a list of {', '.join(allowed)}; got {value!r}")
    for one in chosen:
        if one not in allowed:
            hint = did_you_mean(str(one), allowed, quote="'", cutoff=0.4)
            raise ValueError(f"difficulty {name}: {one!r} is none of {', '.join(allowed)}{hint}")
    return tuple(chosen)


def _range(name: str, value: Any) -> tuple[float, float]:
    least, greatest, whole = _RANGES[name]
    pair = value if isinstance(value, Sequence) and not isinstance(value, str) else [value, value]
    if len(pair) != 2 or not all(_is_number(one, whole) for one in pair) or pair[0] > pair[1]:
        kind = "a whole number" if whole else "a number"
        raise ValueError(f"difficulty {name} must be {kind} or [low, high] with low <= high; got {value!r}")
    if pair[0] < least or pair[1] > greatest:
        raise ValueError(f"difficulty {name} must lie between {least} and {greatest}; got {value!r}")
    low, high = (int(one) if whole else float(one) for one in pair)
    return low, high


def _is_number(value: Any, whole: bool) -> bool:
    if isinstance(value, float):
        return math.isfinite(value) and (not whole or value.is_integer())
    return isinstance(value, int)
