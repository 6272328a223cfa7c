"""Stages of growing difficulty: read from YAML, and the pure rule that says when to move on.

A stage names a range of difficulty, a turn limit and a promotion rule. Nothing here knows about Lightning, policies or
any particular world: `difficulty` is handed to `TaskSet.narrow` as it stands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from gigpo_lightning.resources import find_file
from gigpo_lightning.suggest import did_you_mean
from gigpo_lightning.yaml_keys import repeated_key

TASK_CHOICES = ("uniform", "signal")
# Keys that a fixed schedule leaves without any effect.
_EARNED = ("promote", "min_iterations", "demote")
# A stage's name is part of file names and of the names of figures.
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")


class StageError(ValueError):
    """A stage option with a bad value; `key` is the option, so that a loader can point at its line."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


@dataclass(frozen=True, slots=True)
class Stage:
    """One level of a curriculum.

    Args:
        name: Unique in its curriculum; up to 100 of the characters a–z, A–Z, 0–9, `-`, `_`, and `.` but not first.
        difficulty: Knob name to a value, a list of values or a range, as `TaskSet.narrow` takes it; empty: all tasks.
        max_turns: Turn limit of an episode, ≥ 1.
        promote: Success rate, in (0, 1], from which the stage counts as passed.
        window: Number of latest iterations that are averaged, ≥ 1.
        min_iterations: Iterations to spend in the stage at least, ≥ 1.
        rehearsal: Share of the groups, in [0, 1), that play tasks of earlier stages.
        demote: Success rate, in [0, promote), below which the previous stage comes back; null never.
        iterations: Length of a stage with a fixed schedule, ≥ 1: it is passed after so many iterations whatever the
            success, in place of `promote`, `min_iterations` and `demote`; null for a stage that must be earned.
        start_turns: Turn limit at the start of the stage, in [1, max_turns), for a horizon that grows; null: no growth.
        grow_iterations: Iterations in which the turn limit grows from `start_turns` to `max_turns`, ≥ 1.
        task_choice: `uniform`, or `signal` for more of the tasks that are won now and then (`rollout.task_choice`).
        signal_by: The knobs that tell the classes of tasks apart for `signal`; null for each task by itself where there
            are few, else `type` and `steps`.

    Raises:
        StageError: (a ValueError) an option out of its range.
    """

    name: str
    difficulty: Mapping[str, Any] = field(default_factory=dict)
    max_turns: int = 50
    promote: float = 0.8
    window: int = 3
    min_iterations: int = 3
    rehearsal: float = 0.0
    demote: float | None = None
    iterations: int | None = None
    start_turns: int | None = None
    grow_iterations: int | None = None
    task_choice: str = "uniform"
    signal_by: Sequence[str] | None = None

    def __post_init__(self) -> None:
        allowed = "1 to 100 of the characters a–z, A–Z, 0–9, `-`, `_`, and `.` but not at the start (it names files)"
        _require(isinstance(self.name, str) and bool(_NAME.fullmatch(self.name)), "name", self.name, allowed)
        _check_difficulty(self.difficulty)
        for key in ("max_turns", "window", "min_iterations"):
            _require(_is_count(getattr(self, key)), key, getattr(self, key), "a whole number ≥ 1")
        for key in ("iterations", "grow_iterations"):
            value = getattr(self, key)
            _require(value is None or _is_count(value), key, value, "a whole number ≥ 1, or null")
        _require(_is_number(self.promote) and 0 < self.promote <= 1, "promote", self.promote, "a rate in (0, 1]")
        _require(
            _is_number(self.rehearsal) and 0 <= self.rehearsal < 1, "rehearsal", self.rehearsal, "a share in [0, 1)"
        )
        if self.demote is not None:
            allowed = f"a rate in [0, {self.promote}), below promote, or null"
            _require(_is_number(self.demote) and 0 <= self.demote < self.promote, "demote", self.demote, allowed)
        self._check_growth()
        self._check_choice()

    def _check_growth(self) -> None:
        """Refuse half a growth, one that shrinks, and one that the stage is too short for."""
        start, grow = self.start_turns, self.grow_iterations
        if start is None and grow is None:
            return
        if start is None or grow is None:
            given, missing = ("grow_iterations", "start_turns") if start is None else ("start_turns", "grow_iterations")
            raise StageError(
                given, f"`{given}` needs `{missing}`, too: the turn limit grows from `start_turns` to `max_turns`"
            )
        allowed = f"a whole number ≥ 1 and below `max_turns` ({self.max_turns}), or null"
        _require(_is_count(start) and start < self.max_turns, "start_turns", start, allowed)
        if self.iterations is not None:
            allowed = f"at most the stage's `iterations` ({self.iterations})"
            _require(grow <= self.iterations, "grow_iterations", grow, allowed)

    def _check_choice(self) -> None:
        """Refuse an unknown choice of tasks, and classes that it does not use."""
        choices = "`uniform` or `signal`"
        _require(self.task_choice in TASK_CHOICES, "task_choice", self.task_choice, choices)
        if self.signal_by is None:
            return
        knobs = self.signal_by
        named = isinstance(knobs, (list, tuple)) and bool(knobs) and all(isinstance(knob, str) for knob in knobs)
        _require(named, "signal_by", knobs, "a list of knobs, e.g. [type, steps], or null")
        if self.task_choice != "signal":
            raise StageError("signal_by", "`signal_by` does nothing without `task_choice: signal`")

    def turn_limit(self, iterations: int) -> int:
        """The turn limit of an episode after so many iterations in the stage: `start_turns`, then in equal steps."""
        if self.start_turns is None or self.grow_iterations is None:
            return self.max_turns
        grown = min(iterations, self.grow_iterations) * (self.max_turns - self.start_turns) // self.grow_iterations
        return self.start_turns + grown


@dataclass(frozen=True, slots=True)
class Decision:
    """What the rule says after an iteration, and why. `average` is None while no episode has been counted."""

    promote: bool
    average: float | None
    why: str
    demote: bool = False


def decide(stage: Stage, history: Sequence[Sequence[float]]) -> Decision:
    """Whether `stage` is passed, from what its own episodes did since it began (rehearsal episodes left out).

    The average is pooled, Σ won / Σ episodes over the last `window` iterations, so that an iteration with few episodes
    weighs little. With fewer than `window` iterations played it is the average of those there are: the lower bound on
    patience is `min_iterations`, up and down. Nothing is demoted for episodes that a growing horizon still cut short.

    Args:
        stage: The current stage.
        history: One `(won, episodes)` per iteration in this stage, oldest first.
    """
    average, played = pooled(history[-stage.window :]), len(history)
    if stage.iterations is not None:
        due = played >= stage.iterations
        return Decision(due, average, f"{played} of {stage.iterations} iterations, a fixed schedule")
    if average is None:
        return Decision(False, None, "no episode of this stage yet")
    if played < stage.min_iterations:
        return Decision(False, average, f"{played} of at least {stage.min_iterations} iterations")
    if average >= stage.promote:
        return Decision(True, average, f"success {average:.3f} ≥ {stage.promote:g}")
    growing = stage.grow_iterations is not None and played - stage.window < stage.grow_iterations
    if stage.demote is not None and average < stage.demote and not growing:
        return Decision(False, average, f"success {average:.3f} < {stage.demote:g}", demote=True)
    return Decision(False, average, f"success {average:.3f} < {stage.promote:g}")


def pooled(history: Sequence[Sequence[float]]) -> float | None:
    """Σ won / Σ episodes of some iterations; None without an episode."""
    episodes = sum(entry[1] for entry in history)
    return sum(entry[0] for entry in history) / episodes if episodes else None


def load_stages(path_or_name: str | Path) -> tuple[Stage, ...]:
    """Read the stages of a curriculum file, easiest first.

    Args:
        path_or_name: A file, sought from the working folder, or a shipped curriculum (`alfworld.yaml` or `alfworld`).

    Raises:
        ValueError: No such file, or a bad one; the message names the file and the line.
    """
    path = find_file("curricula", str(path_or_name))
    try:
        text = path.read_text(encoding="utf-8")
        twice, loader = repeated_key(text), yaml.SafeLoader(text)
        root = loader.get_single_node()
        data = loader.construct_document(root) if root is not None else None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"curriculum {path}: not readable as YAML: {error}") from error
    except OSError as error:
        raise ValueError(f"curriculum {path}: cannot be read: {error.strerror}") from error
    if twice is not None:
        raise ValueError(
            f"curriculum {path}:{twice[1]}: `{twice[0]}` is given twice; YAML would take the last one alone"
        )
    return _build(path, root, data)


def stage_named(stages: Sequence[Stage], name: str, option: str) -> Stage:
    """The stage of that name.

    Raises:
        ValueError: There is none; the message begins with `option`.
    """
    names = [stage.name for stage in stages]
    if name in names:
        return stages[names.index(name)]
    hint = did_you_mean(name, names, quote="'")
    raise ValueError(
        f"{option}: there is no stage {name!r}{hint} (stages: {', '.join(names) or 'none, no curriculum runs'})"
    )


def _build(path: Path, root: yaml.Node | None, data: Any) -> tuple[Stage, ...]:
    """Stages from the parsed file; `root` is the same content with line numbers."""
    line = root.start_mark.line + 1 if root is not None else 1
    if not isinstance(data, dict) or list(data) != ["stages"]:
        raise ValueError(f"curriculum {path}:{line}: expected one key, `stages:`, with a list of stages")
    if not isinstance(data["stages"], list) or not data["stages"]:
        raise ValueError(f"curriculum {path}:{line}: the curriculum is empty; `stages:` needs at least one stage")
    stages: list[Stage] = []
    nodes: list[yaml.Node] = root.value[0][1].value  # type: ignore[union-attr]
    for number, (entry, node) in enumerate(zip(data["stages"], nodes, strict=True), start=1):
        where = {key.value: key.start_mark.line + 1 for key, _ in node.value} if isinstance(entry, dict) else {}
        try:
            _check_keys(entry)
            stages.append(Stage(**entry))
            _check_place(stages)
        except StageError as error:
            at = where.get(error.key, node.start_mark.line + 1)
            raise ValueError(f"curriculum {path}:{at}: stage {number}: {error}") from error
    return tuple(stages)


def _check_keys(entry: Any) -> None:
    """Refuse a stage that is no mapping, lacks its name or has a key that is unknown."""
    if not isinstance(entry, dict):
        raise StageError("", f"expected `key: value` lines, got {entry!r}")
    known = [spec.name for spec in fields(Stage)]
    for key in entry:
        if key not in known:
            hint = did_you_mean(str(key), known, quote="`")
            raise StageError(str(key), f"unknown key `{key}`{hint} (known: {', '.join(known)})")
    if "name" not in entry:
        raise StageError("", "`name` is missing")
    useless = [key for key in _EARNED if key in entry] if entry.get("iterations") is not None else []
    if useless:
        raise StageError(
            "iterations",
            f"`iterations` and `{useless[0]}` are both given: with `iterations` the stage is passed after so many, "
            "whatever the success; leave one of them out",
        )


def _check_place(stages: Sequence[Stage]) -> None:
    """Refuse what only the position makes wrong: a name used before, rehearsal or demotion in the first stage."""
    *earlier, stage = stages
    if any(stage.name == other.name for other in earlier):
        raise StageError("name", f"the name {stage.name!r} is used by an earlier stage")
    if not earlier and stage.rehearsal:
        raise StageError("rehearsal", "the first stage has no earlier one to rehearse; leave `rehearsal` out")
    if not earlier and stage.demote is not None:
        raise StageError("demote", "the first stage has no earlier one to go back to; leave `demote` out")


def _check_difficulty(difficulty: Any) -> None:
    """A mapping of knob names to scalars or lists of scalars; which knobs exist only the world knows."""
    _require(isinstance(difficulty, Mapping), "difficulty", difficulty, "a mapping of knobs to values")
    for knob, value in difficulty.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        scalars = bool(values) and all(isinstance(item, (str, bool, int, float)) for item in values)
        _require(isinstance(knob, str) and scalars, "difficulty", {knob: value}, "a value or a list of values per knob")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _require(condition: bool, key: str, value: Any, allowed: str) -> None:
    if not condition:
        raise StageError(key, f"`{key}` is {value!r}, but must be {allowed}")
