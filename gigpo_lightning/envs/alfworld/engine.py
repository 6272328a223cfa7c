"""The simulator: an ALFWorld game as plain dicts and sets, with the stock engine's text and commands.

What can be done when is here; what it does is in `actions.py`. State is kept as values that are replaced on change,
never altered, so that `snapshot` copies references only. Containment is a relation: an object may be in two places.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from gigpo_lightning.envs.alfworld import actions as do
from gigpo_lightning.envs.alfworld import text as say
from gigpo_lightning.envs.alfworld.condition import compile_formula
from gigpo_lightning.envs.alfworld.layout import PROPERTIES
from gigpo_lightning.envs.alfworld.pddl import Fact

if TYPE_CHECKING:
    from gigpo_lightning.envs.alfworld.game import GameData

# A command leads to the function that carries it out and its arguments.
Command = tuple[Callable[..., str], tuple[str, ...]]

# The attributes that make up the state, in the order of `Layout.initial`.
_STATE = ("place", "held", "hands_full", "opened", "contents", "lying", "taken_out", *PROPERTIES.values())
_get_state = attrgetter(*_STATE)


class Simulator:
    """One running game.

    Attributes:
        names: Display names by id.
        place: Id of the location of the agent.
        held: Ids of the held objects (at most one, unless the problem starts with more).
        hands_full: Nothing more can be taken.
        contents: Receptacle id to the sorted ids of what is in or on it.
        opened, clean, hot, cool, sliced, toggled, on: Ids for which the property holds.
        lying: Location id to the sorted ids of the objects at it (`objectAtLocation`).
        taken_out: (object, receptacle) pairs that ended by a `take`; `look` names such objects if they lie near.
        last_text: What was printed last.
    """

    place: str
    held: tuple[str, ...]
    hands_full: bool
    opened: frozenset[str]
    contents: dict[str, tuple[str, ...]]
    lying: dict[str, tuple[str, ...]]
    taken_out: frozenset[tuple[str, str]]
    clean: frozenset[str]
    hot: frozenset[str]
    cool: frozenset[str]
    sliced: frozenset[str]
    toggled: frozenset[str]
    on: frozenset[str]
    last_text: str

    # Worked out on demand, None when out of date.
    _won: bool | None
    _local: dict[str, Command] | None
    _admissible: list[str] | None

    def __init__(self, game: GameData) -> None:
        self.game = game
        self.layout = game.layout
        self.names = self.layout.names
        self._goal = compile_formula(self.layout.goal, _compile_atom)
        self._goal_sees_place = "atlocation" in self.layout.goal_predicates
        self._travel: dict[str, dict[str, Command]] = {}
        self._always: dict[str, Command] = {"look": (do.look, ()), "inventory": (do.inventory, ())}
        if game.has_help:
            self._always["help"] = (do.show_help, ())
        self.reset()

    def reset(self) -> str:
        """Return to the initial state; the text is the stock engine's whole first message."""
        self._load(self.layout.initial)
        # The stock engine describes the place if it has a receptacle, otherwise the whole room.
        if self.place in self.layout.receptacles_at:
            room = do.look(self)
        else:
            room = say.room([self.names[r] for r in self.layout.receptacles])
        self.last_text = say.intro(room, self.game.instruction)
        return self.last_text

    def step(self, command: str) -> tuple[str, bool]:
        """Carry out `command`; returns the text and whether the goal holds now."""
        command = command.strip()
        found = self._local_commands().get(command) or self._travel_commands().get(command)
        if found is None:
            self.last_text = say.NOTHING_HAPPENS
        else:
            act, arguments = found
            self.last_text = act(self, *arguments)
        return self.last_text, self.won

    def is_admissible(self, command: str) -> bool:
        """Whether `command` would be understood now."""
        command = command.strip()
        return command in self._local_commands() or command in self._travel_commands()

    def admissible(self) -> list[str]:
        """The commands that are possible now, sorted and unique."""
        if self._admissible is None:
            self._admissible = sorted([*self._local_commands(), *self._travel_commands()])
        return list(self._admissible)

    @property
    def won(self) -> bool:
        """Whether the goal holds in the present state."""
        if self._won is None:
            self._won = self._goal(self)
        return self._won

    @property
    def inventory(self) -> tuple[str, ...]:
        """Names of the held objects."""
        return tuple(self.names[o] for o in self.held)

    @property
    def place_names(self) -> tuple[str, ...]:
        """Names of the receptacles at the agent's place; empty at the start in the middle of the room."""
        return tuple(self.names[r] for r in self.layout.receptacles_at.get(self.place, ()))

    def snapshot(self) -> tuple[Any, ...]:
        """The state as a value, which other simulators of the same game can `restore`, too."""
        return _get_state(self), self.last_text

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        """Return to the state of `snapshot`, which stays usable."""
        state, self.last_text = snapshot
        self._load(state)

    def is_open(self, receptacle: str) -> bool:
        """Whether one can see into and reach into `receptacle` (always, if it cannot be closed)."""
        return receptacle in self.opened or receptacle not in self.layout.openable

    def describe(self, receptacle: str) -> str:
        """The sentence on what is in or on `receptacle`."""
        things = [self.names[o] for o in self.contents.get(receptacle, ())]
        openable = receptacle in self.layout.openable
        return say.contents(self.names[receptacle], openable, receptacle in self.opened, things)

    def moved(self) -> None:
        """The agent is elsewhere: other commands are possible."""
        self._local = self._admissible = None
        if self._goal_sees_place:
            self._won = None

    def treated(self) -> None:
        """Properties of objects changed: the goal may hold, the commands stay."""
        self._won = None

    def changed(self) -> None:
        """Doors, hands or contents changed: commands and goal have to be worked out again."""
        self._won = self._local = self._admissible = None

    def _load(self, state: tuple[Any, ...]) -> None:
        (self.place, self.held, self.hands_full, self.opened, self.contents, self.lying, self.taken_out,
         self.clean, self.hot, self.cool, self.sliced, self.toggled, self.on) = state  # fmt: skip
        self.changed()

    def _travel_commands(self) -> dict[str, Command]:
        """`go to` everything elsewhere. Going where one is changes nothing, so the stock engine does not offer it."""
        found = self._travel.get(self.place)
        if found is None:
            home = self.layout.location_of
            elsewhere = [r for r in self.layout.receptacles if home[r] != self.place]
            found = self._travel[self.place] = {f"go to {self.names[r]}": (do.go, (r,)) for r in elsewhere}
        return found

    def _local_commands(self) -> dict[str, Command]:
        """Everything but travel, by command."""
        if self._local is None:
            commands = dict(self._always)
            for receptacle in self.layout.receptacles_at.get(self.place, ()):
                self._add_receptacle(receptacle, commands)
            for held in self.held:
                # Only what is held can be examined: a stray comma in the stock domain rules out the rest.
                commands[f"examine {self.names[held]}"] = (do.examine_object, (held,))
                if held in self.layout.knives:
                    for thing in self.lying.get(self.place, ()):
                        if thing in self.layout.sliceable:
                            name = f"slice {self.names[thing]} with {self.names[held]}"
                            commands[name] = (do.slice_object, (thing, held))
            self._local = commands
        return self._local

    def _add_receptacle(self, receptacle: str, commands: dict[str, Command]) -> None:
        layout, names = self.layout, self.names
        name = names[receptacle]
        commands[f"examine {name}"] = (do.examine_receptacle, (receptacle,))
        if receptacle in layout.openable:
            if receptacle in self.opened:
                commands[f"close {name}"] = (do.close_receptacle, (receptacle,))
            else:
                commands[f"open {name}"] = (do.open_receptacle, (receptacle,))
        reachable = self.is_open(receptacle)
        for thing in self.contents.get(receptacle, ()):
            if reachable and not self.hands_full and thing in layout.pickupable:
                commands[f"take {names[thing]} from {name}"] = (do.take, (thing, receptacle))
            # The domain asks neither for an open door nor for free hands to use a switch.
            if thing in layout.toggleable:
                commands[f"use {names[thing]}"] = (do.use, (thing,))
        for thing in self.held:
            if reachable and layout.accepts(receptacle, thing):
                commands[self.game.put_template.format(o=names[thing], r=name)] = (do.put, (thing, receptacle))
            if receptacle in layout.washers and thing in layout.cleanable:
                commands[f"clean {names[thing]} with {name}"] = (do.clean, (thing, receptacle))
            if receptacle in layout.heaters and thing in layout.heatable:
                commands[f"heat {names[thing]} with {name}"] = (do.heat, (thing, receptacle))
            if receptacle in layout.coolers and thing in layout.coolable:
                commands[f"cool {names[thing]} with {name}"] = (do.cool, (thing, receptacle))


def _compile_atom(fact: Fact) -> Callable[[Simulator], bool]:
    """A function that looks one changing fact up in the state."""
    predicate, first, second = fact[0], fact[1], fact[-1]
    if predicate == "atlocation":
        return lambda sim: sim.place == second and first == sim.layout.agent
    if predicate == "inreceptacle":
        return lambda sim: first in sim.contents.get(second, ())
    if predicate == "objectatlocation":
        return lambda sim: first in sim.lying.get(second, ())
    if predicate == "holds":
        return lambda sim: second in sim.held and first == sim.layout.agent
    if predicate == "holdsany":
        return lambda sim: sim.hands_full and first == sim.layout.agent
    attribute = PROPERTIES.get(predicate, "opened")
    return lambda sim: first in getattr(sim, attribute)
