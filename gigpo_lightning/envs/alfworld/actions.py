"""The actions of the ALFRED text domain: each changes the state of a simulator and returns what is printed.

They do not ask whether they are possible: `engine.py` offers only possible ones. Some habits of the stock engine are
kept on purpose; a comment marks each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gigpo_lightning.envs.alfworld import text as say

if TYPE_CHECKING:
    from gigpo_lightning.envs.alfworld.engine import Simulator


def look(sim: Simulator) -> str:
    """Name the receptacles in front, and what lies beside them."""
    near = sim.layout.receptacles_at.get(sim.place)
    if near is None:
        return say.room([])  # stock habit: away from receptacles `look` sees nothing, unlike the intro
    # Stock habit: an object lies beside a receptacle only once it was taken out of that receptacle.
    beside = [sim.names[o] for o in sim.lying.get(sim.place, ()) for r in near if (o, r) in sim.taken_out]
    return say.facing([sim.names[r] for r in near], beside)


def inventory(sim: Simulator) -> str:
    """Name what is held."""
    return say.carrying(sim.inventory) if sim.hands_full else say.EMPTY_HANDED


def show_help(sim: Simulator) -> str:
    """List the commands."""
    return say.help_text()


def go(sim: Simulator, receptacle: str) -> str:
    """Walk to a receptacle."""
    sim.place = sim.layout.location_of[receptacle]
    sim.moved()
    arrived = sim.place if sim.game.arrives_at_location else receptacle
    return f"You arrive at {sim.names[arrived]}. {sim.describe(receptacle)}"


def open_receptacle(sim: Simulator, receptacle: str) -> str:
    """Open a receptacle and see what is in it."""
    sim.opened |= {receptacle}
    sim.changed()
    return f"You open the {sim.names[receptacle]}. {sim.describe(receptacle)}"


def close_receptacle(sim: Simulator, receptacle: str) -> str:
    """Close a receptacle."""
    sim.opened -= {receptacle}
    sim.changed()
    return f"You close the {sim.names[receptacle]}."


def examine_receptacle(sim: Simulator, receptacle: str) -> str:
    """See what is in or on a receptacle."""
    return sim.describe(receptacle)


def examine_object(sim: Simulator, thing: str) -> str:
    """See the properties of an object."""
    layout, name = sim.layout, sim.names[thing]
    if thing in layout.containers:
        return say.examined_container(name, [sim.names[o] for o in layout.held_by_container.get(thing, ())])
    return say.examined(
        name,
        clean=thing in sim.clean,
        hot=thing in sim.hot,
        cool=thing in sim.cool,
        sliced=thing in sim.sliced,
        switched_on=thing in sim.toggled and thing in layout.toggleable,
        sliceable=thing in layout.sliceable,
    )


def take(sim: Simulator, thing: str, receptacle: str) -> str:
    """Take an object out of a receptacle; it may still be in another one."""
    sim.contents = _without(sim.contents, receptacle, thing)
    sim.lying = _without(sim.lying, sim.place, thing)
    sim.taken_out |= {(thing, receptacle)}
    sim.held = tuple(sorted({*sim.held, thing}))
    sim.hands_full = True
    sim.changed()
    return f"You pick up the {sim.names[thing]} from the {sim.names[receptacle]}."


def put(sim: Simulator, thing: str, receptacle: str) -> str:
    """Put a held object in or on a receptacle."""
    sim.contents = _with(sim.contents, receptacle, thing)
    sim.lying = _with(sim.lying, sim.place, thing)
    sim.taken_out -= {(thing, receptacle)}
    sim.held = tuple(o for o in sim.held if o != thing)
    sim.hands_full = False
    sim.changed()
    return sim.game.put_feedback.format(o=sim.names[thing], r=sim.names[receptacle])


def clean(sim: Simulator, thing: str, receptacle: str) -> str:
    """Wash a held object."""
    sim.clean |= {thing}
    sim.treated()
    return f"You clean the {sim.names[thing]} using the {sim.names[receptacle]}."


def heat(sim: Simulator, thing: str, receptacle: str) -> str:
    """Heat a held object."""
    sim.hot |= {thing}
    sim.cool -= {thing}
    sim.treated()
    return f"You heat the {sim.names[thing]} using the {sim.names[receptacle]}."


def cool(sim: Simulator, thing: str, receptacle: str) -> str:
    """Cool a held object."""
    sim.cool |= {thing}
    sim.hot -= {thing}
    sim.treated()
    return f"You cool the {sim.names[thing]} using the {sim.names[receptacle]}."


def use(sim: Simulator, thing: str) -> str:
    """Press the switch of an object."""
    sim.on ^= {thing}
    sim.toggled |= {thing}  # stock habit: never taken back, so that the answer is "turn on" every time
    sim.treated()
    return f"You turn on the {sim.names[thing]}."


def slice_object(sim: Simulator, thing: str, knife: str) -> str:
    """Slice an object with the held knife."""
    sim.sliced |= {thing}
    sim.treated()
    return f"You sliced the {sim.names[thing]} with the {sim.names[knife]}."


def _with(relation: dict[str, tuple[str, ...]], place: str, thing: str) -> dict[str, tuple[str, ...]]:
    return {**relation, place: tuple(sorted({*relation.get(place, ()), thing}))}


def _without(relation: dict[str, tuple[str, ...]], place: str, thing: str) -> dict[str, tuple[str, ...]]:
    return {**relation, place: tuple(o for o in relation.get(place, ()) if o != thing)}
