"""From a household and a goal to a PDDL problem in the recorded games' layout.

Knows nothing about how households are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator

from gigpo_lightning.envs.alfworld.goals import ABILITIES, LOOK, TREATMENTS, TWO, Goal
from gigpo_lightning.envs.alfworld.households import Household
from gigpo_lightning.envs.alfworld.pddl import Expression, Fact
from gigpo_lightning.envs.alfworld.rooms import (
    DECLARED_OBJECTS,
    DECLARED_RECEPTACLES,
    MOVABLE_RECEPTACLES,
    OBJECTS,
)

AGENT = "agent1"
_INDENT = "\n        "
_DECLARED = (
    [(AGENT, "agent")]
    + [(name, "object") for name in DECLARED_OBJECTS]
    + [(f"{name}Type", "otype") for name in DECLARED_OBJECTS]
    + [(f"{name}Type", "rtype") for name in DECLARED_RECEPTACLES]
)
_DECLARED_TEXT = _INDENT.join(f"{name} - {kind}" for name, kind in _DECLARED)


def write_problem(household: Household, goal: Goal, name: str) -> str:
    """The text of the problem file."""
    objects = _INDENT.join(f"{identifier} - {kind}" for identifier, kind in _identifiers(household))
    facts = _INDENT.join(f"({' '.join(fact)})" for fact in _facts(household, goal))
    return (
        f"\n(define (problem plan_{name})\n(:domain alfred)\n"
        f"(:objects{_INDENT}{_DECLARED_TEXT}{_INDENT}{objects}{_INDENT})\n\n"
        f"(:init{_INDENT}{facts}{_INDENT})\n\n(:goal {_spell(_goal(goal))})\n)\n"
    )


def _identifiers(household: Household) -> Iterator[tuple[str, str]]:
    for thing in household.things:
        yield thing.id, "object"
    for receptacle in household.receptacles:
        yield receptacle.id, "receptacle"
    taken = [receptacle.location for receptacle in household.receptacles] + [
        thing.location for thing in household.things
    ]
    for location in dict.fromkeys([*taken, household.start]):
        yield location, "location"


def _facts(household: Household, goal: Goal) -> Iterator[Fact]:
    receptacles, things = household.receptacles, household.things
    kinds = dict.fromkeys(thing.type for thing in things)
    for receptacle in receptacles:
        yield "receptacleType", receptacle.id, f"{receptacle.type}Type"
    for thing in things:
        yield "objectType", thing.id, f"{thing.type}Type"
    for holder, _ in household.layout.counts:
        for kind in kinds:
            if kind in OBJECTS and holder in OBJECTS[kind].holders:
                yield "canContain", f"{holder}Type", f"{kind}Type"
    for thing in things:
        yield from _traits(thing.type, thing.id)
        if goal.type == LOOK and thing.type == goal.target:
            yield "toggleable", thing.id
    for receptacle in receptacles:
        if receptacle.openable:
            yield "openable", receptacle.id
        if receptacle.is_open:
            yield "opened", receptacle.id
    yield "atLocation", AGENT, household.start
    for thing in things:
        for position in thing.inside:
            yield "inReceptacle", thing.id, receptacles[position].id
    for receptacle in receptacles:
        yield "receptacleAtLocation", receptacle.id, receptacle.location
    for thing in things:
        yield "objectAtLocation", thing.id, thing.location


def _traits(kind: str, identifier: str) -> Iterator[Fact]:
    traits = OBJECTS.get(kind)
    if traits is None:
        return
    yield "pickupable", identifier
    if kind in MOVABLE_RECEPTACLES:
        yield "isReceptacleObject", identifier
    for name, has in (
        ("cleanable", traits.cleanable),
        ("heatable", traits.heatable),
        ("coolable", traits.coolable),
        ("sliceable", traits.sliceable),
    ):
        if has:
            yield name, identifier


def _goal(goal: Goal) -> Expression:
    """The goal as nested tuples, in the form the parser gives."""
    if goal.type == LOOK:
        variables = (("?ot", "object"), ("?r", "receptacle"), ("?a", "agent"), ("?l", "location"))
        lamp = (
            "and",
            ("objectType", "?ot", f"{goal.target}Type"),
            ("toggleable", "?ot"),
            ("isToggled", "?ot"),
            ("receptacleAtLocation", "?r", "?l"),
            ("atLocation", "?a", "?l"),
            ("inReceptacle", "?ot", "?r"),
        )
        held = ("and", ("objectType", "?o", f"{goal.object}Type"), ("holds", "?a", "?o"))
        agent_and_object = (("?o", "object"), ("?a", "agent"))
        return ("and", ("exists", variables, lamp), ("exists", agent_and_object, held))
    if goal.type == TWO:
        other = ("exists", (("?o2", "object"),), ("and", ("not", ("=", "?o1", "?o2")), *_placed("?o2", goal)))
        return ("and", _exists("?r", "receptacle", _exists("?o1", "object", ("and", *_placed("?o1", goal), other))))
    treated: tuple[Expression, ...] = ()
    if goal.type in TREATMENTS:
        treated = ((ABILITIES[goal.type], "?o"), (TREATMENTS[goal.type][2], "?o"))
    placed = ("and", *treated, *_placed("?o", goal))
    return ("and", _exists("?r", "receptacle", _exists("?o", "object", placed)))


def _exists(variable: str, kind: str, body: Expression) -> Expression:
    return ("exists", ((variable, kind),), body)


def _placed(variable: str, goal: Goal) -> tuple[Expression, ...]:
    return (
        ("objectType", variable, f"{goal.object}Type"),
        ("receptacleType", "?r", f"{goal.target}Type"),
        ("inReceptacle", variable, "?r"),
    )


def _spell(node: Expression | str) -> str:
    """Nested tuples as PDDL text."""
    if isinstance(node, str):
        return node
    if node[0] == "exists":
        variables = " ".join(f"{name} - {kind}" for name, kind in node[1])
        return f"(exists ({variables}) {_spell(node[2])})"
    return f"({' '.join(_spell(part) for part in node)})"
