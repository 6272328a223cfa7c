"""The stock engine behind the simulator's interface: the oracle of the tests and the fallback `engine: textworld`.

Needs the extra `textworld`. Games are run by textworld's PDDL environment inside alfworld's own wrappers; domain and
grammar of games that only name them are read from the installed alfworld package.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gigpo_lightning.envs.alfworld import recognise
from gigpo_lightning.envs.alfworld.game import GameData, read_game_file
from gigpo_lightning.envs.alfworld.text import TASK_PREFIX

_MISSING = (
    "engine: textworld needs textworld, alfworld and fast-downward, which are not installed: "
    "pip install -c constraints.txt '.[textworld]' (builds from source, needs a C++ compiler, Python 3.12 at most), "
    "or use engine: native"
)
# How the wording of older data differs from the grammar of alfworld 0.4.
_OLD_WORDING = (
    ("You arrive at {r.name}.", "You arrive at {lend.name}."),
    ("move {o} to {r}", "put {o} in/on {r}"),
    ("You move the {o.name} to the {r.name}.", "You put the {o.name} in/on the {r.name}."),
)


def is_available() -> bool:
    """Whether the stock engine is installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("textworld", "alfworld", "fast_downward"))


def require_stock() -> None:
    """Raise `ValueError`, with what to do, unless the stock engine is installed."""
    if not is_available():
        raise ValueError(_MISSING)


def stock_texts() -> tuple[str, str]:
    """Domain and grammar of the installed alfworld package.

    Raises:
        ValueError: alfworld is not installed.
    """
    spec = importlib.util.find_spec("alfworld")
    if spec is None or spec.origin is None:
        raise ValueError(_MISSING)
    folder = Path(spec.origin).parent / "data"
    return (folder / "alfred.pddl").read_text(encoding="utf-8"), (folder / "alfred.twl2").read_text(encoding="utf-8")


def stock_game_file(game: GameData) -> dict[str, Any]:
    """The contents of the `game.tw-pddl` file of `game`, with the real domain and grammar."""
    domain, grammar = stock_texts()
    if game.dialect == "put":
        for new, old in _OLD_WORDING:
            grammar = grammar.replace(new, old)
    if not game.has_help:
        domain = re.sub(r"\(:action help\b.*?\n\)\n", "", domain, flags=re.DOTALL)
    sentence = game.instruction.removesuffix(".")
    return {
        "pddl_domain": domain,
        "grammar": grammar.replace("UNKNOWN GOAL", sentence),
        "pddl_problem": game.problem_text,
        "walkthrough": list(game.walkthrough) or None,
        "solvable": True,
    }


def resolve_game_file(path: str | Path) -> dict[str, Any]:
    """The contents of a game file, domain and grammar filled in where it only names them."""
    data = read_game_file(path)
    named = data["pddl_domain"].strip() == recognise.DOMAIN_MARKER
    if named or data["grammar"].startswith(recognise.GRAMMAR_MARKER):
        domain, grammar = stock_texts()
        if named:
            data["pddl_domain"] = domain
        first, _, rest = data["grammar"].partition("\n")
        if first.strip() == recognise.GRAMMAR_MARKER:
            sentence = rest.removeprefix(TASK_PREFIX).removesuffix(".")
            data["grammar"] = grammar.replace("UNKNOWN GOAL", sentence)
    return data


@contextmanager
def _arguments_kept() -> Iterator[None]:
    """The planner's translator overwrites the command line of the whole process."""
    arguments = list(sys.argv)
    try:
        yield
    finally:
        sys.argv = arguments


class StockEngine:
    """One game in the stock engine, with the methods of `Simulator` that need no copy of the state.

    Not thread-safe, and never quite freed by the stock engine: keep few.

    Args:
        game: Path of a `game.tw-pddl` file, or a game.

    Raises:
        ValueError: The extra is not installed, or the file is corrupted.
    """

    def __init__(self, game: str | Path | GameData) -> None:
        require_stock()
        data = stock_game_file(game) if isinstance(game, GameData) else resolve_game_file(game)
        with _arguments_kept():
            import textworld
            from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos
            from textworld.envs import PddlEnv

            infos = textworld.EnvInfos(won=True, admissible_commands=True, facts=True)
            self._env = AlfredInfos(AlfredDemangler(PddlEnv(infos), shuffle=False))
            try:
                self._env.load(data)
            except KeyError as error:
                # The planner replaces a game without a solution by a dummy of two values, which textworld cannot name.
                raise ValueError(
                    f"the stock engine cannot load the game, most likely it has no solution: {error}"
                ) from error
        self._state: Any = None

    def reset(self) -> str:
        """Start anew; returns the whole first message."""
        with _arguments_kept():
            self._state = self._env.reset()
        return str(self._state.feedback)

    def step(self, command: str) -> tuple[str, bool]:
        """Carry out `command`; returns the text and whether the goal holds now."""
        self._state, _, _ = self._env.step(command)
        return str(self._state.feedback), self.won

    def admissible(self) -> list[str]:
        """The commands that are possible now, sorted and unique."""
        return list(self._state["admissible_commands"])

    def is_admissible(self, command: str) -> bool:
        """Whether `command` would be understood now."""
        return command.strip() in self._state["admissible_commands"]

    @property
    def won(self) -> bool:
        """Whether the goal holds in the present state."""
        return bool(self._state["won"])

    @property
    def last_text(self) -> str:
        """What was printed last."""
        return str(self._state.feedback)

    def facts(self, *predicates: str) -> tuple[str, ...]:
        """The facts of the present state, sorted; only those of `predicates`, if any are given."""
        found = self._state["_facts"]
        return tuple(sorted(str(fact) for fact in found if not predicates or fact.name in predicates))
