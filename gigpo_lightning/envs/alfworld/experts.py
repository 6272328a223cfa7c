"""Two players: one that searches knowing only what it has read, and one that knows the whole room.

`Explorer` reads observations and answers with admissible commands; its decisions are those of `search.Search`.
`oracle_solution` is the shortest solution of a game, tried out in the simulator.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gigpo_lightning.envs.alfworld.engine import Simulator
from gigpo_lightning.envs.alfworld.game import GameData
from gigpo_lightning.envs.alfworld.goals import Want, read_instruction
from gigpo_lightning.envs.alfworld.search import MAX_SEARCH_STEPS, STUCK, Command, Floor, Search, kind_of, shortest
from gigpo_lightning.envs.alfworld.text import NOTHING_HAPPENS
from gigpo_lightning.envs.base import Observation

_LISTED = re.compile(r"\ban? ([a-z]+ \d+)")
_STATE = re.compile(
    r"The ([a-z]+ \d+) is (open|closed)\.(?: In it, you see ([^.]*)\.)?|On the ([a-z]+ \d+), you see ([^.]*)\."
)
_TASK = re.compile(r"Your task is to: ([^\n]*)")
_RESULTS = {"clean": "clean", "heat": "hot", "cool": "cool"}  # Verb to the simulator's set of things so treated.


class Explorer:
    """A player that knows only what it has read: the instruction, the observations, the admissible commands.

    It visits the receptacles in the order in which the room lists them, opens what is closed, and acts as soon as it
    has seen enough. An observation with an instruction starts a new episode.
    """

    def __init__(self) -> None:
        self._search: Search | None = None
        self._last: Command = STUCK
        self._text = ""

    def act(self, observation: Observation, admissible: Sequence[str]) -> str:
        """The next command.

        Args:
            observation: What the world just said; the first one of an episode lists the room and gives the instruction.
            admissible: The commands that are possible now.

        Raises:
            ValueError: The first observation comes without an instruction, or the instruction follows no known wording.
        """
        if observation.instruction or _TASK.search(observation.text):
            self._begin(observation)
        else:
            self._read(observation.text)
        possible = set(admissible)
        for _ in range(len(self.search.places) + len(possible) + 1):
            command = self.search.next()
            text = self._phrase(command, possible)
            if text:
                self._last = command
                return text
            self.search.refused.add(command)
        self._last = STUCK
        return "look" if "look" in possible else admissible[0]

    @property
    def search(self) -> Search:
        """What the player has found out in this episode."""
        if self._search is None:
            raise ValueError("the explorer has to see the first observation of an episode, with its instruction, first")
        return self._search

    def _begin(self, observation: Observation) -> None:
        task = _TASK.search(observation.text)
        want = read_instruction(observation.instruction or (task[1] if task else ""))
        self._search = Search(want, _LISTED.findall(observation.text))
        self._last = STUCK

    def _read(self, text: str) -> None:
        if text.strip() == NOTHING_HAPPENS:
            self.search.refused.add(self._last)
            return
        self.search.did(self._last)
        for opened, state, inside, surface, on_it in _STATE.findall(text):
            if surface:
                self.search.see(surface, _LISTED.findall(on_it))
            else:
                self.search.see(opened, None if state == "closed" else _LISTED.findall(inside))

    def _phrase(self, command: Command, possible: set[str]) -> str:
        """The admissible wording of `command`; empty where there is none."""
        for text in _wordings(command):
            if text in possible:
                return text
        return ""


def _wordings(command: Command) -> list[str]:
    """How `command` may be said, in both dialects of the game."""
    verb, thing, place = command
    if verb == "go":
        # What stands within reach already cannot be gone to; a look at it does the same.
        return [f"go to {place}", f"examine {place}"]
    if verb == "open":
        return [f"open {place}"]
    if verb == "take":
        return [f"take {thing} from {place}"]
    if verb == "move":
        return [f"move {thing} to {place}", f"put {thing} in/on {place}"]
    if verb == "use":
        return [f"use {thing}"]
    return [f"{verb} {thing} with {place}"] if thing else []


def oracle_solution(game: GameData) -> list[str]:
    """A shortest solution of a game as commands; empty where none was found.

    Raises:
        ValueError: The instruction follows none of the known wordings.
    """
    want = read_instruction(game.instruction)
    simulator = Simulator(game)
    commands = []
    for command in shortest(want, _floor(want, simulator)):
        text = next((text for text in _wordings(command) if simulator.is_admissible(text)), "")
        if not text:
            return []
        commands.append(text)
        if simulator.step(text)[1]:
            return commands
    return []


def explorer_solution(game: GameData, limit: int = MAX_SEARCH_STEPS) -> list[str]:
    """The commands with which the explorer solves a game; empty where it does not within `limit` steps.

    Raises:
        ValueError: The instruction follows none of the known wordings.
    """
    simulator, explorer = Simulator(game), Explorer()
    observation = Observation(simulator.reset(), game.instruction)
    commands: list[str] = []
    while len(commands) < limit:
        commands.append(explorer.act(observation, simulator.admissible()))
        text, won = simulator.step(commands[-1])
        if won:
            return commands
        observation = Observation(text)
    return []


def measure(game: GameData) -> dict[str, Any]:
    """The difficulty of a game by the knobs of `GeneratedTasks`, without `type` and `room`.

    `steps` and `oracle_steps` are 0 where there is no such solution or the instruction is worded freely.
    """
    simulator = Simulator(game)
    layout = simulator.layout
    closed = {one for one in layout.receptacles if not simulator.is_open(one)}
    result = {
        "receptacles": len(layout.receptacles),
        "objects": len(layout.pickupable),
        "hidden": round(len(closed) / max(1, len(layout.receptacles)), 3),
        "target_hidden": 0,
        "steps": 0,
        "oracle_steps": 0,
    }
    try:
        want = read_instruction(game.instruction)
    except ValueError:
        return result
    inside = [thing for one in closed for thing in simulator.contents.get(one, ())]
    result["target_hidden"] = int(any(kind_of(layout.names[thing]) == want.object for thing in inside))
    result["steps"] = len(explorer_solution(game))
    result["oracle_steps"] = len(oracle_solution(game))
    return result


def _floor(want: Want, simulator: Simulator) -> Floor:
    """What the oracle has to know, from the simulator's initial state."""
    layout, names = simulator.layout, simulator.layout.names
    places = {names[one]: (layout.location_of[one], not simulator.is_open(one)) for one in layout.receptacles}
    inside: dict[str, list[str]] = {}
    for receptacle, things in simulator.contents.items():
        for thing in things if receptacle in layout.location_of else ():
            inside.setdefault(names[thing], []).append(names[receptacle])
    treated = frozenset(names[thing] for thing in getattr(simulator, _RESULTS[want.verb])) if want.verb else frozenset()
    return Floor(simulator.place, places, inside, treated)
