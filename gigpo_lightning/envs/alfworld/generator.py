"""Draws one game to order: a layout of the right split, a goal it can serve, and a difficulty inside the asked bands.

The order of drawing makes rejection rare: the goal's objects are placed last, and placed again until the text-only
search needs the wanted number of steps; only then are coordinates and other objects made. Knows nothing about indices,
task sets or files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from gigpo_lightning.envs.alfworld.furnishing import Draft, Placed, enclose, furnish
from gigpo_lightning.envs.alfworld.goals import (
    ABILITIES,
    FEWEST_STEPS,
    LOOK,
    SIMPLE,
    TASK_ROOMS,
    TREATMENTS,
    TWO,
    Goal,
)
from gigpo_lightning.envs.alfworld.households import Household, Layout, draw_layout, is_unseen, listing
from gigpo_lightning.envs.alfworld.knobs import Knobs, inside
from gigpo_lightning.envs.alfworld.rooms import FURNITURE, LAMP_HOLDERS, OPENABLE, ROOM_OBJECTS
from gigpo_lightning.envs.alfworld.search import MAX_SEARCH_STEPS, Command, Floor, search_length, shortest

OPEN_FRAC = 0.04  # Chance that an openable receptacle starts open.
SHARED_FRAC = 0.05  # Chance that a drawer or cabinet is reached from the same standing place as the one before it.
SHARED_PLACES = frozenset({"Cabinet", "Drawer"})
LAMP = "DeskLamp"
ATTEMPTS = 400  # Rooms drawn before the knobs are said to be in conflict.
SAME_TYPE_ATTEMPTS = 6  # Rooms tried for one task type before another is drawn, so that easy types do not take over.
LAYOUT_ATTEMPTS = 64
PLACEMENTS = 10  # Ways tried to place the goal's objects in one room.


@dataclass(frozen=True, slots=True)
class Generated:
    """A household with a goal, how it is worded, and its measured difficulty."""

    household: Household
    goal: Goal
    wording: int
    steps: int
    solution: tuple[Command, ...]
    hidden: float
    target_hidden: bool


class _Rejected(Exception):
    """The draw does not fit; `knob` names the one that failed."""

    def __init__(self, *knobs: str) -> None:
        super().__init__()
        self.knobs = knobs


def generate(random: Random, knobs: Knobs, unseen: bool, like: Generated | None = None) -> Generated:
    """One game.

    Args:
        random: The source of randomness.
        knobs: The ranges that the game's difficulty must lie in.
        unseen: Draw a layout of the unseen split (else a training layout).
        like: Take the layout of this game, and its task type too unless that fails.

    Raises:
        ValueError: No game fits after many draws; the message names the knobs that conflict.
    """
    failures: Counter[str] = Counter()
    layout = like.household.layout if like else None
    kind = ""
    for attempt in range(ATTEMPTS):
        if attempt == 0 and like:
            kind = like.goal.type
        elif attempt % SAME_TYPE_ATTEMPTS == 0:
            kind = random.choice(knobs.feasible_types(FEWEST_STEPS, TASK_ROOMS, layout.room if layout else None))
        try:
            return _in_layout(random, knobs, kind, layout or _layout(random, knobs, kind, unseen))
        except _Rejected as rejected:
            failures.update(rejected.knobs)
    raise ValueError(knobs.conflict([name for name, _ in failures.most_common(3)]))


def _layout(random: Random, knobs: Knobs, kind: str, unseen: bool) -> Layout:
    rooms = [room for room in TASK_ROOMS[kind] if room in knobs.rooms]
    room = random.choice(rooms)
    low, high = knobs.receptacles
    high = min(high, sum(FURNITURE[room].values()))
    if knobs.steps:
        # A search visits and opens every place at most once, and needs at most 10 steps besides.
        low = max(low, (knobs.steps[0] - 10 + 1) // 2)
    if low > high:
        raise _Rejected("receptacles", "steps" if knobs.steps else "room")
    count = random.randint(low, high)
    for _ in range(LAYOUT_ATTEMPTS):
        layout = draw_layout(random, room, count, _required(random, kind, room))
        if is_unseen(layout) == unseen:
            return layout
    raise _Rejected("receptacles", "type", "room")


def _required(random: Random, kind: str, room: str) -> list[str]:
    if kind == LOOK:
        return [random.choice([holder for holder in LAMP_HOLDERS if holder in FURNITURE[room]])]
    return [TREATMENTS[kind][0]] if kind in TREATMENTS else []


def _in_layout(random: Random, knobs: Knobs, kind: str, layout: Layout) -> Generated:
    if kind in TREATMENTS and TREATMENTS[kind][0] not in dict(layout.counts):
        raise _Rejected("type", "room")
    draft = _draft(random, knobs, kind, layout)
    goal = _goal(random, kind, draft)
    placed, steps, solution = _fitting_places(random, knobs, draft, goal)
    household = furnish(random, draft, placed, _objects(random, knobs, draft, placed))
    if not inside(household.objects, knobs.objects):  # nothing else may lie in such furniture
        raise _Rejected("objects", "receptacles")
    hidden = round(len(draft.closed) / len(draft.places), 3)
    return Generated(household, goal, random.randrange(2), steps, solution, hidden, _is_hidden(draft, placed))


def _fitting_places(
    random: Random, knobs: Knobs, draft: Draft, goal: Goal
) -> tuple[list[Placed], int, tuple[Command, ...]]:
    """Places for the goal's objects that give a difficulty inside the bands; the explorer's steps; the solution."""
    low, high = knobs.steps or (1, MAX_SEARCH_STEPS)
    first, last = 0, len(draft.places) - 1
    missed = "steps"
    for _ in range(PLACEMENTS):
        placed = _place(random, draft, goal, range(first, last + 1))
        floor = _floor(draft, placed)
        steps = search_length(goal.want(), floor, high)
        # What is listed later is found later: move the objects towards the wanted length.
        if steps > high:
            last = max(where[0] for _, where in placed) - 1
        elif steps < low:
            first = min(where[0] for _, where in placed) + 1
        elif not inside(int(_is_hidden(draft, placed)), knobs.target_hidden):
            missed = "target_hidden"
        else:
            solution = shortest(goal.want(), floor)
            if inside(len(solution), knobs.oracle_steps):
                return placed, steps, tuple(solution)
            missed = "oracle_steps"
    raise _Rejected(missed, "receptacles", "type")


def _is_hidden(draft: Draft, placed: Sequence[Placed]) -> bool:
    """Whether a wanted object lies in a closed receptacle."""
    return any(position in draft.closed for kind, where in placed if kind != LAMP for position in where)


def _draft(random: Random, knobs: Knobs, kind: str, layout: Layout) -> Draft:
    """The room, with the share of closed receptacles that is asked for."""
    places = tuple(listing(layout))
    tool = TREATMENTS[kind][0] if kind in TREATMENTS else ""
    openable = [position for position, (place, _) in enumerate(places) if place in OPENABLE]
    closed = [one for one in openable if places[one][0] == tool or random.random() >= OPEN_FRAC]
    if knobs.hidden:
        low, high = (bound * len(places) for bound in knobs.hidden)
        random.shuffle(openable)
        if len(closed) > high:
            closed = openable[: int(high)]
        elif len(closed) < low:
            closed = openable
        if not low <= len(closed) <= high:
            raise _Rejected("hidden", "room", "receptacles")
    beside = frozenset(
        position
        for position in range(1, len(places))
        if places[position][0] in SHARED_PLACES
        and places[position][0] == places[position - 1][0]
        and random.random() < SHARED_FRAC
    )
    return Draft(layout, places, frozenset(closed), beside)


def _goal(random: Random, kind: str, draft: Draft) -> Goal:
    """A goal of this type that the room can serve; target types are drawn evenly, then objects."""
    held = {}
    for thing in ROOM_OBJECTS[draft.layout.room]:
        if kind in ABILITIES and not getattr(thing, ABILITIES[kind]):
            continue
        places = {draft.places[position][0] for position in draft.holders(thing.name)}
        if places:
            held[thing.name] = places
    if kind == LOOK:
        if not held or not draft.holders(LAMP):
            raise _Rejected("type", "receptacles")
        return Goal(kind, random.choice(list(held)), LAMP)
    options: dict[str, list[str]] = {}
    for target, _ in draft.layout.counts:
        # Without a treatment the object must come from elsewhere.
        things = [name for name, places in held.items() if target in places and (kind in TREATMENTS or len(places) > 1)]
        if things:
            options[target] = things
    if not options:
        raise _Rejected("type", "receptacles")
    target = random.choice(list(options))
    return Goal(kind, random.choice(options[target]), target)


def _place(random: Random, draft: Draft, goal: Goal, window: range) -> list[Placed]:
    """Where the wanted objects lie, and the lamps, by positions in `window`: never so that nothing is left to do."""
    sources = [position for position in draft.holders(goal.object) if position in window]
    if goal.type in (SIMPLE, TWO):
        sources = [position for position in sources if draft.places[position][0] != goal.target]
    lamps = [position for position in draft.holders(LAMP) if position in window]
    if not sources or (goal.type == LOOK and not lamps):
        raise _Rejected("steps", "receptacles", "type")
    copies = (2 if goal.type == TWO else 1) + random.choice((0, 0, 0, 1, 1, 2))
    placed = [enclose(random, draft, goal.object, random.choice(sources), goal.target) for _ in range(copies)]
    if goal.type == LOOK:
        placed += [(LAMP, (random.choice(lamps),)) for _ in range(random.choice((1, 1, 2)))]
    return placed


def _floor(draft: Draft, placed: Sequence[Placed]) -> Floor:
    places: dict[str, tuple[str, bool]] = {}
    location = ""
    for position, (_, name) in enumerate(draft.places):
        location = location if position in draft.beside else name
        places[name] = (location, position in draft.closed)
    numbers: Counter[str] = Counter()
    things = {}
    for kind, where in placed:
        numbers[kind] += 1
        things[f"{kind.lower()} {numbers[kind]}"] = [draft.places[position][1] for position in where]
    return Floor("", places, things)


def _objects(random: Random, knobs: Knobs, draft: Draft, placed: Sequence[Placed]) -> int:
    needed = sum(kind != LAMP for kind, _ in placed)
    low, high = knobs.objects or (len(draft.places) // 2 + 1, min(len(draft.places) * 3 // 2 + 1, 45))
    if needed > high and knobs.objects:
        raise _Rejected("objects", "type")
    return random.randint(max(low, needed), max(high, needed))
