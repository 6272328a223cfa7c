"""One game as a value: problem, task sentence and dialect, read from a `game.tw-pddl` file or made in memory.

Knows the file format; parsing, rules and text are elsewhere. A game is plain text inside, so that it travels to worker
processes cheaply; what is worked out from it is worked out once where it is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from gigpo_lightning.envs.alfworld import recognise
from gigpo_lightning.envs.alfworld.digests import DOMAIN_DIGESTS
from gigpo_lightning.envs.alfworld.layout import Layout
from gigpo_lightning.envs.alfworld.pddl import Problem, parse_problem
from gigpo_lightning.envs.alfworld.recognise import DOMAIN_MARKER, GRAMMAR_MARKER
from gigpo_lightning.envs.alfworld.text import TASK_PREFIX

DIALECTS = ("move", "put")
_AGAIN = "was its download or generation cut short? Fetch or make the games again"
_PUT_TEMPLATES = {"move": "move {o} to {r}", "put": "put {o} in/on {r}"}
_PUT_FEEDBACK = {"move": "You move the {o} to the {r}.", "put": "You put the {o} in/on the {r}."}


@dataclass(frozen=True)
class GameData:
    """Everything that the engines need of one game.

    Attributes:
        problem_text: The PDDL problem.
        instruction: The task sentence after "Your task is to: "; a missing full stop is added, as the grammar has one.
        dialect: "move" (`move X to Y`; data of ALFWorld 0.4) or "put" (`put X in/on Y`; older data).
        task_type: One of ALFWorld's six task types, or "" where it is not known.
        walkthrough: A known solution, if the file has one.
        arrives_at_location: `go to` answers with the location ("You arrive at loc 3.", older data), not the receptacle.
        has_help: There is a `help` command.
        source: Where the game came from, for messages.
    """

    problem_text: str
    instruction: str
    dialect: str = "move"
    task_type: str = ""
    walkthrough: tuple[str, ...] = ()
    arrives_at_location: bool = False
    has_help: bool = True
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.dialect not in DIALECTS:
            raise ValueError(f"dialect must be one of {', '.join(DIALECTS)}; got {self.dialect!r}")
        if not self.instruction.endswith("."):
            object.__setattr__(self, "instruction", self.instruction + ".")

    @cached_property
    def problem(self) -> Problem:
        """The parsed problem."""
        return parse_problem(self.problem_text)

    @cached_property
    def layout(self) -> Layout:
        """The static side of the game, shared by all its episodes."""
        return Layout(self.problem)

    @property
    def put_template(self) -> str:
        """The command that puts `{o}` in or on `{r}`."""
        return _PUT_TEMPLATES[self.dialect]

    @property
    def put_feedback(self) -> str:
        """The answer to it."""
        return _PUT_FEEDBACK[self.dialect]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("problem", "layout")}


def game_from_problem(
    problem_text: str, instruction: str, dialect: str = "move", task_type: str = "", walkthrough: tuple[str, ...] = ()
) -> GameData:
    """A game made in memory.

    Args:
        problem_text: A PDDL problem of the ALFRED text domain.
        instruction: The task sentence after "Your task is to: ".
        dialect: "move" or "put".
        task_type: One of the six task types, or "".
        walkthrough: A solution, if known.

    Raises:
        ValueError: A malformed problem, or an unknown dialect.
    """
    old = dialect == "put"
    game = GameData(problem_text, instruction, dialect, task_type, walkthrough, old, not old)
    _ = game.layout  # a malformed problem is found here, not at the first reset
    return game


def load_game(path: str | Path) -> GameData:
    """Read a `game.tw-pddl` file. The task type comes from a `traj_data.json` beside it, if there is one.

    Raises:
        ValueError: The file is missing, corrupted, or made for rules or sentences that the native engine does not know.
    """
    path = Path(path)
    data = read_game_file(path)
    try:
        return _game(data, str(path), _task_type(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"game file {path}: {error}") from error


def read_game_file(path: str | Path) -> dict[str, Any]:
    """The JSON object of a game file, with its required texts checked for presence.

    Raises:
        ValueError: The file is missing or corrupted.
    """
    data = read_json(path)
    for key in ("pddl_domain", "grammar", "pddl_problem"):
        if not isinstance(data.get(key), str):
            raise ValueError(f"game file {path} has no text {key!r}: it is no game.tw-pddl file")
    walkthrough = data.get("walkthrough") or []
    if not isinstance(walkthrough, list) or not all(isinstance(command, str) for command in walkthrough):
        raise ValueError(f"game file {path}: 'walkthrough' must be a list of commands, but it is {walkthrough!r:.80}")
    return data


def read_text(path: str | Path, errors: str = "strict") -> str:
    """The text of a file; `errors` as in `bytes.decode`.

    Raises:
        ValueError: It is missing, cannot be read, or is not UTF-8; the message names the file.
    """
    try:
        return Path(path).read_text(encoding="utf-8", errors=errors)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; {_AGAIN}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text ({error}); {_AGAIN}") from error


def read_json(path: str | Path) -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises:
        ValueError: The file cannot be read or holds something else; the message names the file.
    """
    text = read_text(path)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON ({error}); {_AGAIN}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a JSON {type(data).__name__} instead of an object; {_AGAIN}")
    return data


def marker_grammar(instruction: str) -> str:
    """What a generated file holds instead of a grammar: "the ALFRED grammar of ALFWorld 0.4, with this task"."""
    return f"{GRAMMAR_MARKER}\n{TASK_PREFIX}{instruction}"


def _game(data: Mapping[str, Any], source: str, task_type: str) -> GameData:
    if data["pddl_domain"].strip() == DOMAIN_MARKER:
        actions = frozenset(DOMAIN_DIGESTS) - {":types"}
    else:
        actions = recognise.check_domain(data["pddl_domain"])
    marker, _, rest = data["grammar"].partition("\n")
    if marker.strip() == GRAMMAR_MARKER:
        variants, instruction = {"command putobject": "move"}, rest.removeprefix(TASK_PREFIX)
    else:
        variants, instruction = recognise.check_grammar(data["grammar"], actions)
    game = GameData(
        problem_text=data["pddl_problem"],
        instruction=instruction,
        dialect=variants["command putobject"],
        task_type=task_type,
        walkthrough=tuple(data.get("walkthrough") or ()),
        arrives_at_location=variants.get("GotoLocation.feedback") == "location",
        has_help="help" in actions,
        source=source,
    )
    if variants.get("PutObject.feedback", game.dialect) != game.dialect:
        raise ValueError(f"its grammar mixes the 'move' and the 'put' dialect: {recognise.REFUSAL}")
    _ = game.layout
    return game


def _task_type(path: Path) -> str:
    beside = path.with_name("traj_data.json")
    return str(read_json(beside).get("task_type", "")) if beside.is_file() else ""
