"""What never changes in one game: names, places, affordances, the start, the goal's formula; compiled once per game.

Knows the predicates of the ALFRED domain, nothing about commands, sentences or the present state.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from gigpo_lightning.envs.alfworld.condition import Grounder, atoms
from gigpo_lightning.envs.alfworld.pddl import Fact, Problem

# Predicates that actions change, with the number of their arguments; `checked` has no reader and is left out.
FLUENTS = {
    "atlocation": 2,
    "opened": 1,
    "inreceptacle": 2,
    "objectatlocation": 2,
    "holds": 2,
    "holdsany": 1,
    "isclean": 1,
    "ishot": 1,
    "iscool": 1,
    "ison": 1,
    "istoggled": 1,
    "issliced": 1,
}
# Properties of objects: the name in the state, by predicate.
PROPERTIES = {
    "isclean": "clean",
    "ishot": "hot",
    "iscool": "cool",
    "issliced": "sliced",
    "istoggled": "toggled",
    "ison": "on",
}
_SIGNATURES = {
    "atlocation": ("agent", "location"),
    "receptacleatlocation": ("receptacle", "location"),
    "objectatlocation": ("object", "location"),
    "inreceptacle": ("object", "receptacle"),
    "inreceptacleobject": ("object", "object"),
    "holds": ("agent", "object"),
    "holdsany": ("agent",),
    "openable": ("receptacle",),
    "opened": ("receptacle",),
    **dict.fromkeys(("isclean", "ishot", "iscool", "ison", "istoggled", "issliced"), ("object",)),
    **dict.fromkeys(("cleanable", "heatable", "coolable", "sliceable", "toggleable", "pickupable"), ("object",)),
    "isreceptacleobject": ("object",),
}
_KNIVES = ("knifetype", "butterknifetype")
_UNSUPPORTED = "{what}; the native engine does not play such games: use engine: textworld"


def display_names(facts: Iterable[Fact]) -> dict[str, str]:
    """The names that players read, by id: `apple_bar_...` is `apple 2`, where the smallest id has the largest number.

    Only ids that occur in a fact are counted. An id without `_bar_` is named by itself and a space.
    """
    ids = sorted({argument for fact in facts for argument in fact[1:]})
    kinds: dict[str, str | None] = {}
    for one in ids:
        kind, bar, _ = one.partition("_bar_")
        kinds[one] = (kind + "basin" if "basin" in one else kind) if bar else None
    left = Counter(kind for kind in kinds.values() if kind is not None)
    names = {}
    for one in ids:
        own = kinds[one]
        if own is None:
            names[one] = one + " "
        else:
            names[one] = f"{own} {left[own]}"
            left[own] -= 1
    return names


class Layout:
    """The static side of one problem.

    Raises:
        ValueError: The problem has a shape that no ALFRED game has (two agents, a receptacle in two places, wrongly
            typed facts, a goal over bookkeeping predicates).
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.names = display_names(problem.facts)
        by_predicate: dict[str, list[Fact]] = defaultdict(list)
        for fact in problem.facts:
            by_predicate[fact[0]].append(fact[1:])
        _check_types(by_predicate, problem.objects)
        self.agent, start = _agent_and_start(by_predicate["atlocation"])
        self.initial = _initial_state(by_predicate, start)
        self._compile_receptacles(by_predicate)
        self._compile_objects(by_predicate)
        self.goal = _goal_formula(problem)
        goal_ids = {argument for fact in atoms(self.goal) for argument in fact[1:]}
        self.goal_predicates = frozenset(fact[0] for fact in atoms(self.goal))
        self.goal_objects = tuple(sorted(o for o in goal_ids if problem.objects.get(o) == "object"))
        self.goal_receptacles = frozenset(r for r in goal_ids if problem.objects.get(r) == "receptacle")

    def _compile_receptacles(self, facts: Mapping[str, list[Fact]]) -> None:
        # Sorted by id: the order in which the room and the receptacles of one place are listed.
        placed = sorted(facts["receptacleatlocation"])
        self.location_of: dict[str, str] = {fact[0]: fact[1] for fact in placed}
        if len(self.location_of) != len(placed):
            raise ValueError(_UNSUPPORTED.format(what="a receptacle stands at two locations"))
        self.receptacles = tuple(self.location_of)
        self.receptacles_at: dict[str, tuple[str, ...]] = {}
        for receptacle, place in placed:
            self.receptacles_at[place] = (*self.receptacles_at.get(place, ()), receptacle)
        self.openable = frozenset(fact[0] for fact in facts["openable"])
        kinds = facts["receptacletype"]
        self.washers = frozenset(r for r, kind in kinds if kind == "sinkbasintype")
        self.heaters = frozenset(r for r, kind in kinds if kind == "microwavetype")
        self.coolers = frozenset(r for r, kind in kinds if kind == "fridgetype")

    def _compile_objects(self, facts: Mapping[str, list[Fact]]) -> None:
        for predicate in ("cleanable", "heatable", "coolable", "sliceable", "toggleable", "pickupable"):
            setattr(self, predicate, frozenset(fact[0] for fact in facts[predicate]))
        self.containers = frozenset(fact[0] for fact in facts["isreceptacleobject"])
        self.held_by_container: dict[str, tuple[str, ...]] = {}
        for inner, outer in sorted(facts["inreceptacleobject"]):
            if inner != outer:
                self.held_by_container[outer] = (*self.held_by_container.get(outer, ()), inner)
        self.kinds_of: dict[str, frozenset[str]] = _relation(facts["objecttype"])
        self.kinds_of_receptacle: dict[str, frozenset[str]] = _relation(facts["receptacletype"])
        self.knives = frozenset(o for o, kind in facts["objecttype"] if kind in _KNIVES)
        allowed = _relation(facts["cancontain"])
        # What a receptacle accepts, by its types.
        self.accepted_kinds = {
            receptacle: frozenset().union(*(allowed.get(kind, frozenset()) for kind in kinds))
            for receptacle, kinds in self.kinds_of_receptacle.items()
        }

    cleanable: frozenset[str]
    heatable: frozenset[str]
    coolable: frozenset[str]
    sliceable: frozenset[str]
    toggleable: frozenset[str]
    pickupable: frozenset[str]

    def accepts(self, receptacle: str, thing: str) -> bool:
        """Whether `thing` may be put in or on `receptacle`."""
        kinds = self.kinds_of.get(thing)
        return kinds is not None and not kinds.isdisjoint(self.accepted_kinds.get(receptacle, frozenset()))


def _relation(pairs: Iterable[Fact]) -> dict[str, frozenset[str]]:
    grouped: dict[str, set[str]] = defaultdict(set)
    for first, second in pairs:
        grouped[first].add(second)
    return {first: frozenset(seconds) for first, seconds in grouped.items()}


def _check_types(facts: Mapping[str, list[Fact]], objects: Mapping[str, str]) -> None:
    for predicate, kinds in _SIGNATURES.items():
        for arguments in facts.get(predicate, ()):
            if tuple(objects[one] for one in arguments) != kinds:
                shown = f"({predicate} {' '.join(arguments)})"
                raise ValueError(_UNSUPPORTED.format(what=f"the fact {shown} should be about {', '.join(kinds)}"))
    for predicate in ("receptacletype", "objecttype", "cancontain"):
        for arguments in facts.get(predicate, ()):
            if len(arguments) != 2:
                raise ValueError(f"the fact ({predicate} {' '.join(arguments)}) must have two arguments")


def _agent_and_start(places: list[Fact]) -> Fact:
    if len(places) != 1:
        raise ValueError(_UNSUPPORTED.format(what=f"the problem has {len(places)} (atLocation ...) facts instead of 1"))
    return places[0]


def _initial_state(facts: Mapping[str, list[Fact]], place: str) -> tuple[Any, ...]:
    """The state at the start: place, held, hands full, opened, contents, objects lying about, taken out, properties."""
    contents = _sorted_relation((receptacle, thing) for thing, receptacle in facts["inreceptacle"])
    lying = _sorted_relation((where, thing) for thing, where in facts["objectatlocation"])
    held = tuple(sorted(thing for _, thing in facts["holds"]))
    opened = frozenset(fact[0] for fact in facts["opened"])
    properties = (frozenset(fact[0] for fact in facts[predicate]) for predicate in PROPERTIES)
    return (place, held, bool(facts["holdsany"]), opened, contents, lying, frozenset(), *properties)


def _sorted_relation(pairs: Iterable[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    return {first: tuple(sorted(seconds)) for first, seconds in _relation(pairs).items()}


def _goal_formula(problem: Problem) -> object:
    facts = frozenset(problem.facts)
    formula = Grounder(problem.objects, facts, frozenset(FLUENTS) | {"checked"}).ground(problem.goal)
    for predicate, *arguments in atoms(formula):
        if FLUENTS.get(predicate) != len(arguments):
            shown = f"({predicate} {' '.join(arguments)})"
            raise ValueError(_UNSUPPORTED.format(what=f"the goal depends on {shown}"))
    return formula
