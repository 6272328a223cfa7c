"""ALFWorld's tasks: generated without limit, or recorded in the original data. Both play in `AlfworldEnv`."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from random import Random
from typing import Any, TypeVar

from gigpo_lightning.envs.alfworld.env import AlfworldEnv
from gigpo_lightning.envs.alfworld.experts import Explorer, measure
from gigpo_lightning.envs.alfworld.game import GameData, load_game
from gigpo_lightning.envs.alfworld.generator import Generated, generate
from gigpo_lightning.envs.alfworld.knobs import Knobs, inside
from gigpo_lightning.envs.alfworld.problems import write_problem
from gigpo_lightning.envs.alfworld.recorded import RecordedGame, find_data, list_games
from gigpo_lightning.envs.alfworld.vocabulary import vocabulary
from gigpo_lightning.envs.base import Task, TaskSet

_Tasks = TypeVar("_Tasks", bound="_AlfworldTasks")
SPLITS = ("train", "seen", "unseen")
MOST_TASKS = 1_000_000_000  # more than any run can play; what counts or draws tasks need not handle larger numbers


class _AlfworldTasks(TaskSet):
    """What generated and recorded tasks share: the splits, ranges that can be narrowed, and who plays."""

    _knobs: Knobs
    _anchor: str
    _engine: str

    @property
    def splits(self) -> tuple[str, ...]:
        """`train`, `seen` and `unseen`."""
        return SPLITS

    def narrow(self: _Tasks, difficulty: Mapping[str, Any]) -> _Tasks:
        """These tasks with narrower ranges.

        The knobs are `type`, `room`, `receptacles`, `steps`, `oracle_steps`, `objects`, `hidden`, `target_hidden`: see
        `Knobs`. Of recorded games all have to be read and solved once for knobs other than `type` and `room`: about
        20 ms each.

        Args:
            difficulty: Knob name to a value, a list of allowed values (`type`, `room`) or `[low, high]`.

        Raises:
            ValueError: An unknown knob, a malformed value, or knobs that leave no task; of recorded games that is
                found when a split is first looked at.
        """
        narrowed = copy(self)
        narrowed._narrow(difficulty)
        return narrowed

    @abstractmethod
    def _narrow(self, difficulty: Mapping[str, Any]) -> None:
        """Narrow the ranges of this very object."""

    def make_env(self) -> AlfworldEnv:
        """A fresh environment that plays these tasks."""
        return AlfworldEnv(anchor=self._anchor, engine=self._engine)

    def make_expert(self) -> Explorer:
        """The explorer, which searches systematically and knows only what it has read."""
        return Explorer()

    def vocabulary(self) -> Sequence[str]:
        """Words and fixed phrases of the world."""
        return vocabulary()


class GeneratedTasks(_AlfworldTasks):
    """Households and goals drawn from a seed: the same task for the same split and index on every machine.

    The splits are disjoint by layout: a kind of room with a number of receptacles of each type belongs to `unseen` or
    to the others. `seen` tasks take the layouts of training tasks, with objects and goals drawn anew.

    Args:
        seed: Another seed, other households.
        train_tasks: Number of training tasks, of each split from 1 to 10⁹.
        seen_tasks: Number of evaluation tasks in training layouts.
        unseen_tasks: Number of evaluation tasks in layouts of their own.
        difficulty: The ranges that tasks are drawn from, as in `narrow`; null: everything the world has.
        anchor: Level of the anchor key, see `AlfworldEnv`.
        engine: `native`, or `textworld` for the stock engine.
    """

    def __init__(
        self,
        seed: int = 0,
        train_tasks: int = 1_000_000,
        seen_tasks: int = 1_000,
        unseen_tasks: int = 1_000,
        difficulty: Mapping[str, Any] | None = None,
        anchor: str = "task",
        engine: str = "native",
    ) -> None:
        self.seed = seed
        self._sizes = {"train": train_tasks, "seen": seen_tasks, "unseen": unseen_tasks}
        for split, size in self._sizes.items():
            if not 1 <= size <= MOST_TASKS:
                raise ValueError(f"{split}_tasks must be at least 1 and at most {MOST_TASKS:,}; got {size}")
        self._knobs = Knobs()
        self._anchor, self._engine = anchor, engine
        if difficulty:
            self._narrow(difficulty)

    @property
    def knobs(self) -> Knobs:
        """The ranges that tasks are drawn from."""
        return self._knobs

    def len(self, split: str) -> int:
        """The number of tasks of `split`."""
        if split not in self._sizes:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}; got {split!r}")
        return self._sizes[split]

    def get(self, split: str, index: int) -> Task:
        """Task number `index`; its `payload` is a `GameData`.

        Raises:
            ValueError: An unknown split, or difficulty knobs that no game fits.
            IndexError: `index` is not in `0 <= index < len(split)`.
        """
        if not 0 <= index < self.len(split):
            raise IndexError(f"index must be from 0 to {self.len(split) - 1} in split {split!r}; got {index}")
        return _task(split, self._digest(split, index), self._generate(split, index))

    def _narrow(self, difficulty: Mapping[str, Any]) -> None:
        self._knobs = self._knobs.narrow(difficulty)
        self._generate("train", 0)  # conflicting knobs are found here, not in the middle of a run

    def _digest(self, split: str, index: int) -> bytes:
        text = f"{self.seed} {split} {index} {self._knobs.key()}"
        return hashlib.sha256(text.encode()).digest()

    def _generate(self, split: str, index: int) -> Generated:
        digest = self._digest(split, index)
        random = Random(int.from_bytes(digest, "big"))
        if split != "seen":
            return generate(random, self._knobs, split == "unseen")
        origin = int.from_bytes(digest[:8], "big") % self._sizes["train"]
        return generate(random, self._knobs, False, like=self._generate("train", origin))


class RecordedTasks(_AlfworldTasks):
    """The original games, unchanged: the folders `train`, `valid_seen` and `valid_unseen` of `json_2.1.1`.

    Args:
        data_dir: The folder that holds `json_2.1.1`; null: `$ALFWORLD_DATA`, else `~/.cache/alfworld`.
        difficulty: Ranges as in `narrow`; null: all games.
        anchor: Level of the anchor key, see `AlfworldEnv`.
        engine: `native`, or `textworld` for the stock engine.

    Raises:
        ValueError: There are no games; the message has the commands that fetch them.
    """

    def __init__(
        self,
        data_dir: str | None = None,
        difficulty: Mapping[str, Any] | None = None,
        anchor: str = "task",
        engine: str = "native",
    ) -> None:
        self._folder = find_data(data_dir)
        self._knobs = Knobs.unlimited()
        self._given: tuple[str, ...] = ()  # knobs that the user set: only these need a game to be measured
        self._games: dict[str, list[RecordedGame]] = {}
        self._measured: dict[str, dict[str, Any]] = {}
        self._anchor, self._engine = anchor, engine
        if difficulty:
            self._narrow(difficulty)

    def len(self, split: str) -> int:
        """The number of games of `split`."""
        return len(self._split(split))

    def get(self, split: str, index: int) -> Task:
        """Game number `index` in sorted order; its `payload` is a `GameData`.

        Raises:
            ValueError: An unknown split, or a corrupted or unknown game file (the message names it).
            IndexError: `index` is not in `0 <= index < len(split)`.
        """
        games = self._split(split)
        if not 0 <= index < len(games):
            raise IndexError(f"index must be from 0 to {len(games) - 1} in split {split!r}; got {index}")
        recorded = games[index]
        game = replace(load_game(recorded.path), task_type=recorded.type)
        return Task(recorded.id, split, {"type": recorded.type, "room": recorded.room, **self._measure(recorded)}, game)

    def _narrow(self, difficulty: Mapping[str, Any]) -> None:
        self._knobs = self._knobs.narrow(difficulty)
        self._given = tuple(dict.fromkeys((*self._given, *difficulty)))
        self._games = {}

    def _split(self, split: str) -> list[RecordedGame]:
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}; got {split!r}")
        if split not in self._games:
            found = [game for game in list_games(self._folder, split) if self._fits(game)]
            if not found:
                raise ValueError(self._knobs.conflict(self._given) + f" (split {split!r} of {self._folder})")
            self._games[split] = found
        return self._games[split]

    def _fits(self, game: RecordedGame) -> bool:
        if game.type not in self._knobs.types or game.room not in self._knobs.rooms:
            return False
        ranges = [name for name in self._given if name not in ("type", "room")]
        return not ranges or all(inside(self._measure(game)[name], getattr(self._knobs, name)) for name in ranges)

    def _measure(self, game: RecordedGame) -> dict[str, Any]:
        if game.path not in self._measured:
            self._measured[game.path] = measure(load_game(game.path))
        return self._measured[game.path]


def _task(split: str, digest: bytes, made: Generated) -> Task:
    name = digest.hex()[:12]
    goal, layout = made.goal, made.household.layout
    text = write_problem(made.household, goal, name)
    game = GameData(text, goal.instruction(made.wording), task_type=goal.type)
    difficulty = {
        "type": goal.type,
        "room": layout.room,
        "receptacles": layout.receptacles,
        "objects": made.household.objects,
        "hidden": made.hidden,
        "target_hidden": int(made.target_hidden),
        "steps": made.steps,
        "oracle_steps": len(made.solution),
    }
    folder = f"{goal.type}-{goal.object}-None-{goal.target}-{made.household.scene}"
    return Task(f"{folder}/trial_{name}", split, difficulty, game)
