"""What a household is, and the drawing of layouts, which decide the split.

A layout is a kind of room and its number of receptacles of each type: all that the first observation tells. Unseen
tasks live in layouts that no training task has. Knows nothing about goals, text or coordinates. All randomness comes
from the `random.Random` that is passed in, and no logarithm or power is taken, so that every machine draws the same.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from gigpo_lightning.envs.alfworld.rooms import BASINS, FURNITURE, OBJECTS, OPENABLE

SALT = "5"  # Chosen so that every task type has layouts of both kinds even with two receptacles.
UNSEEN_FRAC = 0.25  # Share of layouts kept for the unseen split.
FIRST_OF_TYPE_WEIGHT = 4.0  # A second cabinet is drawn this many times less often than a first one.


@dataclass(frozen=True, slots=True)
class Layout:
    """The kind of room and how many receptacles of each type it has, types in alphabetical order."""

    room: str
    counts: tuple[tuple[str, int], ...]

    @property
    def receptacles(self) -> int:
        """The number of receptacles."""
        return sum(count for _, count in self.counts)


@dataclass(frozen=True, slots=True)
class Receptacle:
    """A piece of furniture: identifiers as in problem files, `name` as the game prints it."""

    type: str
    id: str
    name: str
    location: str
    is_open: bool

    @property
    def openable(self) -> bool:
        """Whether it can be opened and closed."""
        return self.type in OPENABLE


@dataclass(frozen=True, slots=True)
class Thing:
    """An object or fixture. `inside`: indices of the receptacles it lies in (none for a fixture that stands alone)."""

    type: str
    id: str
    name: str
    location: str
    inside: tuple[int, ...]

    @property
    def portable(self) -> bool:
        """Whether it can be picked up."""
        return self.type in OBJECTS


@dataclass(frozen=True, slots=True)
class Household:
    """A furnished room before the agent's first step, standing at `start`, away from all receptacles."""

    layout: Layout
    scene: int
    start: str
    receptacles: tuple[Receptacle, ...]
    things: tuple[Thing, ...]

    @property
    def objects(self) -> int:
        """The number of things that can be picked up."""
        return sum(thing.portable for thing in self.things)


@lru_cache(maxsize=65536)
def layout_digest(layout: Layout) -> int:
    """A 64-bit number that depends on nothing but the layout; the same on every machine."""
    text = f"{SALT}{layout.room}:{','.join(f'{kind}={count}' for kind, count in layout.counts)}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def is_unseen(layout: Layout) -> bool:
    """Whether the layout belongs to the unseen split; all others are training layouts."""
    return layout_digest(layout) < UNSEEN_FRAC * 2**64


def draw_layout(random: Random, room: str, receptacles: int, required: Iterable[str] = ()) -> Layout:
    """A layout of `receptacles` pieces that has at least one of each `required` type.

    First pieces of a type are preferred to further ones: small rooms are varied, large ones full of cabinets.
    """
    counts = Counter(required)
    ranked = []
    for kind, most in FURNITURE[room].items():
        for number in range(counts[kind], most):
            weight = FIRST_OF_TYPE_WEIGHT if number == 0 else 1.0
            ranked.append((random.random() / weight, kind))
    ranked.sort()
    missing = receptacles - counts.total()
    counts.update(kind for _, kind in ranked[: max(0, missing)])
    return Layout(room, tuple(sorted(counts.items())))


def listing(layout: Layout) -> list[tuple[str, str]]:
    """(type, printed name) of the receptacles in the order in which the game lists them.

    The game lists by identifier and numbers downwards, so the order does not depend on coordinates.
    """
    ordered = sorted(layout.counts, key=lambda entry: id_prefix(entry[0]).lower())
    return [(kind, f"{kind.lower()} {number}") for kind, count in ordered for number in range(count, 0, -1)]


def id_prefix(kind: str) -> str:
    """What the identifiers of a type start with: the basins are parts of a sink or a bathtub and named after it."""
    return BASINS.get(kind, kind)
