"""Fills a room: coordinates and identifiers, the objects that matter, and everything else that lies about.

A `Draft` is a room before coordinates, its receptacles known by their position in the listing; `furnish` makes a
`Household` of it. Knows nothing about goals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from random import Random

from gigpo_lightning.envs.alfworld.households import Household, Layout, Receptacle, Thing, id_prefix, layout_digest
from gigpo_lightning.envs.alfworld.rooms import (
    BASINS,
    FIRST_SCENE,
    FIXTURES,
    LAMP_HOLDERS,
    OBJECTS,
    OPENABLE,
    OVERLAPS,
    ROOM_OBJECTS,
    SCENES_PER_ROOM,
)

DOUBLE_FRAC = 0.15  # Chance that an object which may lie in two receptacles at once does.
FIXTURE_FRAC = 0.5  # Chance that a kind of fixture is there.

Placed = tuple[str, tuple[int, ...]]  # A type and the positions of the receptacles that hold it.


@dataclass(frozen=True, slots=True)
class Draft:
    """A room before coordinates: positions are indices into `places`, the order in which the game lists receptacles."""

    layout: Layout
    places: tuple[tuple[str, str], ...]
    closed: frozenset[int]
    beside: frozenset[int]  # reached from the same standing place as the receptacle listed before

    def holders(self, object_type: str) -> list[int]:
        """The positions that may hold an object of this type."""
        kinds = OBJECTS[object_type].holders if object_type in OBJECTS else LAMP_HOLDERS
        return [position for position, (kind, _) in enumerate(self.places) if kind in kinds]


def furnish(random: Random, draft: Draft, placed: Sequence[Placed], objects: int) -> Household:
    """The household of a draft, with `objects` portable things in all.

    Args:
        random: The source of randomness.
        draft: The room.
        placed: The things that matter. No further thing of their types is added.
        objects: The number of portable things; at least those in `placed`.
    """
    spots = _Coordinates(random)
    start = spots.location()
    receptacles = _receptacles(draft, spots)
    missing = objects - sum(kind in OBJECTS for kind, _ in placed)
    everything = [*placed, *_others(random, draft, missing, {kind for kind, _ in placed}), *_fixtures(random, draft)]
    things = []
    for kind, inside in everything:
        location = receptacles[inside[0]].location if inside else spots.location()
        things.append((kind, spots.identifier(kind), location, inside))
    scene = FIRST_SCENE[draft.layout.room] + layout_digest(draft.layout) % SCENES_PER_ROOM
    return Household(draft.layout, scene, start, tuple(receptacles), _numbered(things))


def enclose(random: Random, draft: Draft, kind: str, position: int, keep_out: str = "") -> Placed:
    """A thing put at `position`, and now and then also in a second receptacle that encloses the same space.

    Args:
        random: The source of randomness.
        draft: The room.
        kind: The thing's type.
        position: Where it is put.
        keep_out: A receptacle type that may not be one of two (what is taken from the other would still lie in it).
    """
    around = OVERLAPS.get(draft.places[position][0], ())
    if not around or draft.places[position][0] == keep_out or random.random() >= DOUBLE_FRAC:
        return kind, (position,)
    more = [
        other
        for other in draft.holders(kind)
        if draft.places[other][0] in around and draft.places[other][0] != keep_out
    ]
    return kind, ((position, random.choice(more)) if more else (position,))


class _Coordinates:
    """Identifiers as the simulator makes them: a type and three coordinates in centimetres, all different."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._used: set[str] = set()

    def _fresh(self, draw: Callable[[], str]) -> str:
        text = draw()
        while text in self._used:
            text = draw()
        self._used.add(text)
        return text

    def identifier(self, kind: str) -> str:
        """An identifier such as `Apple_bar__minus_01_dot_25_bar__plus_00_dot_90_bar__plus_02_dot_10`."""
        return self._fresh(lambda: self._identifier(kind))

    def _identifier(self, kind: str) -> str:
        # One draw for the three axes: -3.00 to 2.99 m twice, and a height of 0 to 1.99 m.
        number = self._random.randrange(600 * 200 * 600)
        number, x = divmod(number, 600)
        z, y = divmod(number, 200)
        suffix = f"_bar_{kind}" if kind in BASINS else ""
        return f"{id_prefix(kind)}{_METRES[x]}{_METRES[y + 300]}{_METRES[z]}{suffix}"

    def location(self) -> str:
        """A standing place such as `loc_bar_3_bar__minus_7_bar_3_bar_30`: quarter metres, quarter turns, degrees."""
        return self._fresh(self._location)

    def _location(self) -> str:
        number = self._random.randrange(26 * 26 * 4 * 4)
        number, x = divmod(number, 26)
        number, z = divmod(number, 26)
        horizon, turn = divmod(number, 4)
        return f"loc_bar_{_QUARTERS[x]}_bar_{_QUARTERS[z]}_bar_{turn}_bar_{_HORIZONS[horizon]}"


def _signed(value: int) -> str:
    return f"_minus_{-value}" if value < 0 else str(value)


_METRES = tuple(
    f"_bar_{'_minus_' if cm < 0 else '_plus_'}{abs(cm) // 100:02d}_dot_{abs(cm) % 100:02d}" for cm in range(-300, 300)
)
_QUARTERS = tuple(_signed(value) for value in range(-13, 13))
_HORIZONS = tuple(_signed(value) for value in (-30, 0, 30, 60))


def _receptacles(draft: Draft, spots: _Coordinates) -> list[Receptacle]:
    result: list[Receptacle] = []
    position = 0
    for kind, group in groupby(draft.places, key=lambda place: place[0]):
        names = [name for _, name in group]
        for identifier, name in zip(sorted((spots.identifier(kind) for _ in names), key=str.lower), names, strict=True):
            location = result[-1].location if position in draft.beside else spots.location()
            is_open = kind in OPENABLE and position not in draft.closed
            result.append(Receptacle(kind, identifier, name, location, is_open))
            position += 1
    return result


def _others(random: Random, draft: Draft, count: int, wanted: set[str]) -> list[Placed]:
    """`count` further portable things, none of a wanted type, each where its type may lie."""
    kinds = []
    for kind in ROOM_OBJECTS[draft.layout.room]:
        if kind.name not in wanted:
            holders = draft.holders(kind.name)
            if holders:
                kinds.append((kind.name, holders))
    if not kinds:
        return []
    drawn = [random.choice(kinds) for _ in range(count)]
    return [enclose(random, draft, name, random.choice(holders)) for name, holders in drawn]


def _fixtures(random: Random, draft: Draft) -> list[Placed]:
    result: list[Placed] = []
    for kind, stands in FIXTURES[draft.layout.room].items():
        if random.random() < FIXTURE_FRAC:
            spots = [position for position, (place, _) in enumerate(draft.places) if place in stands]
            if spots:
                result.append((kind, (random.choice(spots),)))
            elif not stands:
                result.append((kind, ()))
    return result


def _numbered(things: Sequence[tuple[str, str, str, tuple[int, ...]]]) -> tuple[Thing, ...]:
    """Sorted by identifier and numbered downwards within each type, as the game does."""
    ordered = sorted(things, key=lambda thing: thing[1].lower())
    left = Counter(kind for kind, *_ in ordered)
    result = []
    for kind, identifier, location, inside in ordered:
        result.append(Thing(kind, identifier, f"{kind.lower()} {left[kind]}", location, inside))
        left[kind] -= 1
    return tuple(result)
