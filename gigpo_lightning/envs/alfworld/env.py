"""ALFWorld as an environment: one running game, played by the native simulator or by the stock engine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

from gigpo_lightning.envs.alfworld import text as say
from gigpo_lightning.envs.alfworld.anchors import LEVELS, digest
from gigpo_lightning.envs.alfworld.engine import Simulator
from gigpo_lightning.envs.alfworld.game import GameData, load_game
from gigpo_lightning.envs.alfworld.oracle import StockEngine
from gigpo_lightning.envs.base import Observation, StepResult, Task, TextEnv

ENGINES = ("native", "textworld")
_CACHED_GAMES = 32
_STOCK_LEVELS = ("text", "view", "full")
_games: OrderedDict[Hashable, GameData] = OrderedDict()


class AlfworldEnv(TextEnv):
    """One ALFWorld game at a time.

    Args:
        anchor: What makes two states the same: `text` (the last observation), `view` (that, the inventory and the
            place), `task` (place, inventory and the state of what the goal is about) or `full` (every fact).
        engine: `native`, or `textworld` for games that the native engine refuses (needs the extra; no `task` anchor).
        win_reward: Reward of the step that reaches the goal; every other step has 0.

    Raises:
        ValueError: An unknown anchor or engine, or an anchor that the engine does not have.
    """

    def __init__(self, anchor: str = "task", engine: str = "native", win_reward: float = 1.0) -> None:
        if engine not in ENGINES:
            raise ValueError(f"engine must be one of {', '.join(ENGINES)}; got {engine!r}")
        levels = tuple(LEVELS) if engine == "native" else _STOCK_LEVELS
        if anchor not in levels:
            raise ValueError(f"anchor must be one of {', '.join(levels)} with engine: {engine}; got {anchor!r}")
        self._anchor = anchor
        self._engine = engine
        self._win_reward = float(win_reward)
        self._game: Simulator | StockEngine | None = None
        self._loaded: Hashable = None

    def reset(self, task: Task) -> Observation:
        """Start the game of `task.payload`: the path of a `game.tw-pddl` file, or a `GameData`.

        Raises:
            ValueError: The game is missing, corrupted, or unknown to the engine.
        """
        key = _cache_key(task.payload)
        if self._game is None or key != self._loaded:
            self._game = _start(task.payload, key, self._engine)
            self._loaded = key
        room, _, instruction = self._game.reset().partition(say.TASK_PREFIX)
        return Observation(room.removeprefix(say.BANNER).strip(), instruction)

    def step(self, action: str) -> StepResult:
        """Take one action; a bad one is answered by "Nothing happens."."""
        game = self._running()
        valid = game.is_admissible(action)
        text, won = game.step(action)
        reward = self._win_reward if won else 0.0
        return StepResult(Observation(text), reward, won, False, {"won": won, "valid": valid})

    def admissible_actions(self) -> Sequence[str]:
        """The commands that are possible now, sorted and unique."""
        return self._running().admissible()

    def anchor(self) -> Hashable:
        """The anchor key of the present state at the chosen level: a digest of 24 hexadecimal digits."""
        game = self._running()
        if isinstance(game, Simulator):
            return digest(LEVELS[self._anchor](game))
        predicates = {"text": None, "view": ("atlocation", "holds"), "full": ()}[self._anchor]
        facts = () if predicates is None else game.facts(*predicates)
        return digest((self._anchor, game.last_text if self._anchor != "full" else "", facts))

    def snapshot(self) -> Any:
        """A copy of the state (`engine: native` only)."""
        return self.simulator.snapshot()

    def restore(self, snapshot: Any) -> None:
        """Return to `snapshot` (`engine: native` only)."""
        self.simulator.restore(snapshot)

    @property
    def simulator(self) -> Simulator:
        """The running simulator, for experts and diagnostics.

        Raises:
            NotImplementedError: The stock engine is running.
        """
        game = self._running()
        if not isinstance(game, Simulator):
            raise NotImplementedError("the stock engine has no state to look into or to copy: use engine: native")
        return game

    def _running(self) -> Simulator | StockEngine:
        if self._game is None:
            raise RuntimeError("reset(task) comes before anything else")
        return self._game


def _cache_key(payload: Any) -> Hashable:
    """Equal keys mean the same game; a file that was rewritten is another game."""
    if isinstance(payload, GameData):
        return payload
    if not isinstance(payload, str | Path):
        raise TypeError(f"the payload of an ALFWorld task must be a path or a GameData; got {type(payload).__name__}")
    try:
        state = Path(payload).stat()
    except OSError as error:
        raise ValueError(f"game file {payload} cannot be read: {error.strerror}") from error
    return (str(payload), state.st_mtime_ns, state.st_size)


def _start(payload: Any, key: Hashable, engine: str) -> Simulator | StockEngine:
    if engine == "textworld":
        return StockEngine(payload)
    game = _games.get(key)
    if game is None:
        game = payload if isinstance(payload, GameData) else load_game(payload)
        _games[key] = game
        if len(_games) > _CACHED_GAMES:
            _games.popitem(last=False)
    else:
        _games.move_to_end(key)
    return Simulator(game)
