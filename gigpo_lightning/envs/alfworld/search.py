"""Solving a room without text: the systematic searcher's decisions, and the shortest solution.

`Search` sees places and decides commands; the text explorer lends it eyes, and `search_length` runs it over a bare list
of contents, which is how a generated task learns its difficulty in microseconds. `shortest` knows the whole room. Names
are those the game prints; nothing here reads or writes sentences.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gigpo_lightning.envs.alfworld.goals import LOOK, Want

Command = tuple[str, str, str]  # (verb, object, place); the object is empty where the verb has none
STUCK: Command = ("look", "", "")
MAX_SEARCH_STEPS = 200  # Visiting and opening 44 places twice over, and then acting, stays below.


def kind_of(name: str) -> str:
    """The type word of a numbered name: "cabinet" of "cabinet 3"."""
    return name.split(" ", 1)[0]


class Search:
    """Systematic search for one goal: visit the places in listing order, act as soon as enough is known.

    Args:
        want: The goal as read.
        places: The names of all receptacles in the order in which the room listed them.
    """

    def __init__(self, want: Want, places: Sequence[str]) -> None:
        self.want = want
        self.places = list(places)
        self.targets = [place for place in places if kind_of(place) == want.target]
        self.tools = [place for place in places if kind_of(place) == want.tool]
        self.contents: dict[str, list[str]] = {}  # what was read of places that are open
        self.closed: set[str] = set()
        self.at = ""
        self.carried = ""
        self.treated: set[str] = set()
        self.delivered: set[str] = set()
        self.refused: set[Command] = set()  # commands that turned out to be impossible

    def see(self, place: str, things: Iterable[str] | None) -> None:
        """Note what lies in `place`; None: it is closed."""
        if things is None:
            self.closed.add(place)
        else:
            self.closed.discard(place)
            self.contents[place] = list(things)

    def did(self, command: Command) -> None:
        """Note that `command` succeeded."""
        verb, thing, place = command
        if verb == "go":
            self.at = place
        elif verb == "take":
            self.carried = thing
            if thing in self.contents.get(place, ()):
                self.contents[place].remove(thing)
        elif verb == "move":
            self.carried = ""
            self.delivered.add(thing)
            self.contents.setdefault(place, []).append(thing)
        elif verb == self.want.verb:
            self.treated.add(thing)

    def next(self) -> Command:
        """The next command; `STUCK` where nothing is left to try."""
        if not self.carried:
            return self._fetch() or self._explore()
        if self.want.type == LOOK:
            return self._light() or self._explore()
        if self.want.tool and self.carried not in self.treated:
            return self._reach(self._first(self.tools), (self.want.verb, self.carried))
        return self._reach(self._destination(), ("move", self.carried), inside=True)

    def _fetch(self) -> Command | None:
        settled = self._destination() if not self.want.tool else ""
        for place in (self.at, *self.places):
            if place == settled or place not in self.contents:
                continue
            for thing in self.contents[place]:
                wanted = kind_of(thing) == self.want.object and thing not in self.delivered
                if wanted and ("take", thing, place) not in self.refused:
                    return self._reach(place, ("take", thing), inside=True)
        return None

    def _light(self) -> Command | None:
        for place in (self.at, *self.places):
            for thing in self.contents.get(place, ()):
                if kind_of(thing) == self.want.target and ("use", thing, place) not in self.refused:
                    return self._reach(place, ("use", thing))
        return None

    def _explore(self) -> Command:
        for place in self.places:
            if place not in self.contents and ("go", "", place) not in self.refused:
                command = ("open", "", place) if place == self.at else ("go", "", place)
                if command not in self.refused:
                    return command
        return STUCK

    def _destination(self) -> str:
        """The target to fill: where most of the wanted lies, then the present place, then one known to be open."""

        def rank(place: str) -> tuple[int, bool, bool]:
            things = self.contents.get(place)
            there = sum(kind_of(thing) == self.want.object for thing in things or ())
            return (-there if self.want.copies > 1 else 0, place != self.at, things is None)

        return min(self.targets, key=rank, default="")

    def _first(self, places: Sequence[str]) -> str:
        return self.at if self.at in places else next(iter(places), "")

    def _reach(self, place: str, action: tuple[str, str], inside: bool = False) -> Command:
        """Go to `place`, open it if the action needs its inside, act."""
        if not place:
            return STUCK
        if self.at != place:
            return ("go", "", place)
        if inside and place in self.closed:
            return ("open", "", place)
        return (*action, place)


@dataclass(slots=True)
class Floor:
    """All that the length of a solution depends on.

    Attributes:
        start: The location of the agent.
        places: Receptacle name to (location, whether it starts closed), in listing order.
        inside: Thing name to the receptacles that hold it: at least the wanted objects and the lamps.
        treated: Things that already have the wanted property.
    """

    start: str
    places: Mapping[str, tuple[str, bool]]
    inside: Mapping[str, Sequence[str]]
    treated: frozenset[str] = field(default_factory=frozenset)


def search_length(want: Want, floor: Floor, limit: int = MAX_SEARCH_STEPS) -> int:
    """The number of steps in which `Search` solves a room, without running the game.

    Returns:
        The length of the solution, or `limit + 1` where the search does not end within `limit` steps.
    """
    search = Search(want, list(floor.places))
    shut = {place for place, (_, closed) in floor.places.items() if closed}
    inside: dict[str, list[str]] = {}
    for thing, places in sorted(floor.inside.items()):
        for place in places:
            inside.setdefault(place, []).append(thing)
    for step in range(1, limit + 1):
        command = search.next()
        verb, thing, place = command
        search.did(command)
        if verb == "open":
            shut.discard(place)
        if verb in ("go", "open"):
            search.see(place, None if place in shut else inside.get(place, ()))
        elif verb == "take":
            inside[place].remove(thing)
        elif verb == "move":
            inside.setdefault(place, []).append(thing)
            if sum(kind_of(other) == want.object for other in inside[place]) >= want.copies:
                return step
        elif verb == "use":
            return step
        elif command == STUCK:
            break
    return limit + 1


def shortest(want: Want, floor: Floor) -> list[Command]:
    """A shortest solution of a room that is not solved yet; empty where there is none.

    Fetch, treat, bring, for every sensible choice of object, tool and target. (An object that lies in two receptacles
    stays in the second one when it is taken from the first; shorter solutions by that quirk are not sought.)
    """
    routes = _light_routes(want, floor) if want.type == LOOK else _bring_routes(want, floor)
    return min(routes, key=len, default=[])


def _light_routes(want: Want, floor: Floor) -> Iterator[list[Command]]:
    lamps = [(lamp, place) for lamp, places in floor.inside.items() if kind_of(lamp) == want.target for place in places]
    for thing, source in _sources(want, floor):
        for lamp, place in lamps:
            route = _Route(floor)
            route.act("take", thing, source, inside=True)
            route.act("use", lamp, place)
            yield route.commands


def _bring_routes(want: Want, floor: Floor) -> Iterator[list[Command]]:
    sources = list(_sources(want, floor))
    tools = [place for place in floor.places if kind_of(place) == want.tool]
    for target in _targets(want, floor, [place for _, place in sources] + tools):
        settled = [thing for thing, place in sources if place == target] if not want.tool else []
        fetched = [(thing, place) for thing, place in sources if thing not in settled]
        missing = want.copies - len(settled)
        for tool in tools if want.tool else [""]:
            for first in fetched:
                for second in fetched if missing > 1 else [None]:
                    if second is None or second[0] != first[0]:
                        yield _carry(want, floor, target, tool, [first] if second is None else [first, second])


def _carry(want: Want, floor: Floor, target: str, tool: str, loads: Iterable[tuple[str, str]]) -> list[Command]:
    route = _Route(floor)
    for thing, source in loads:
        route.act("take", thing, source, inside=True)
        if tool and thing not in floor.treated:
            route.act(want.verb, thing, tool)
        route.act("move", thing, target, inside=True)
    return route.commands


def _sources(want: Want, floor: Floor) -> Iterator[tuple[str, str]]:
    for thing, places in floor.inside.items():
        if kind_of(thing) == want.object:
            for place in places:
                yield thing, place


def _targets(want: Want, floor: Floor, others: Iterable[str]) -> Iterator[str]:
    """One target receptacle of every sort that makes a difference: closed or not, near a place of interest or not."""
    near = {floor.places[place][0] for place in others}
    seen = set()
    for place, (location, closed) in floor.places.items():
        if kind_of(place) == want.target:
            held = sum(place in places for thing, places in floor.inside.items() if kind_of(thing) == want.object)
            sort = (closed, location if location in near else "", held)
            if sort not in seen:
                seen.add(sort)
                yield place


class _Route:
    """Commands in a row, walking and opening only where needed."""

    def __init__(self, floor: Floor) -> None:
        self._floor = floor
        self._at = floor.start
        self._opened: set[str] = set()
        self.commands: list[Command] = []

    def act(self, verb: str, thing: str, place: str, inside: bool = False) -> None:
        """Do something with `thing` at `place`; `inside`: the place has to be open for it."""
        location, closed = self._floor.places[place]
        if location != self._at:
            self.commands.append(("go", "", place))
            self._at = location
        if inside and closed and place not in self._opened:
            self.commands.append(("open", "", place))
            self._opened.add(place)
        self.commands.append((verb, thing, place))
