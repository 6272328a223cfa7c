"""Anchor keys of the simulator's state, from what is read to everything there is.

Equal keys within a group form a step group. Coarse keys give large groups that mix different states; fine keys give
pure groups that are rarely shared. A key is a short digest, the same on every machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from gigpo_lightning.envs.alfworld.engine import Simulator
from gigpo_lightning.envs.alfworld.layout import PROPERTIES

_PROPERTIES = tuple(PROPERTIES.values())


def digest(key: Any) -> str:
    """24 hexadecimal digits of `key`, a nested tuple of strings and numbers."""
    return hashlib.blake2b(repr(key).encode(), digest_size=12).hexdigest()


def text_key(sim: Simulator) -> Any:
    """The last observation: the key of the published method."""
    return ("text", sim.last_text)


def view_key(sim: Simulator) -> Any:
    """The last observation, what is held and where one stands."""
    return ("view", sim.last_text, sim.held, sim.place)


def task_key(sim: Simulator) -> Any:
    """Place, held objects, and of the objects that the goal is about: where they are, whether one can reach them, and
    their properties. Other objects, and doors with nothing of interest behind them, do not count."""
    layout = sim.layout
    relevant = layout.goal_objects
    where = []
    for receptacle, things in sim.contents.items():
        inside = tuple(thing for thing in things if thing in relevant)
        if inside:
            where.append((receptacle, inside, sim.is_open(receptacle)))
    closed_goals = tuple(sorted(r for r in layout.goal_receptacles if not sim.is_open(r)))
    properties = tuple(tuple(o for o in relevant if o in getattr(sim, name)) for name in _PROPERTIES)
    held_properties = tuple((o, *(o in getattr(sim, name) for name in _PROPERTIES)) for o in sim.held)
    return ("task", sim.place, tuple(sorted(where)), closed_goals, properties, held_properties)


def full_key(sim: Simulator) -> Any:
    """Every fact that can change."""
    facts = [tuple(sorted(getattr(sim, name))) for name in ("opened", "taken_out", *_PROPERTIES)]
    relations = [tuple(sorted((k, v) for k, v in relation.items() if v)) for relation in (sim.contents, sim.lying)]
    return ("full", sim.place, sim.held, *facts, *relations)


LEVELS: dict[str, Callable[[Simulator], Any]] = {
    "text": text_key,
    "view": view_key,
    "task": task_key,
    "full": full_key,
}
