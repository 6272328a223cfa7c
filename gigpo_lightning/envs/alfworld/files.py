"""Writes generated games as files, in the layout of the recorded data, so that any ALFWorld engine can play them.

`<folder>/json_2.1.1/<split>/<task>-<object>-None-<target>-<scene>/trial_<id>/` holds `traj_data.json`,
`initial_state.pddl` and `game.tw-pddl`. Domain and grammar are those of the installed alfworld package; without one, a
marker stands in their place, which our engines understand.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gigpo_lightning.envs.alfworld.experts import oracle_solution
from gigpo_lightning.envs.alfworld.game import GameData, marker_grammar
from gigpo_lightning.envs.alfworld.goals import LOOK
from gigpo_lightning.envs.alfworld.oracle import stock_texts
from gigpo_lightning.envs.alfworld.recognise import DOMAIN_MARKER
from gigpo_lightning.envs.alfworld.recorded import DATA_VERSION, SPLIT_FOLDERS
from gigpo_lightning.envs.alfworld.tasks import GeneratedTasks
from gigpo_lightning.envs.base import Task, TaskSet
from gigpo_lightning.files import replacing


def write_games(tasks: TaskSet, split: str, count: int, folder: str | Path) -> list[Path]:
    """Write the first `count` tasks of `split` and return the paths of their game files.

    Args:
        tasks: Generated tasks.
        split: `train`, `seen` or `unseen`.
        count: Number of games; at most the size of the split.
        folder: The data folder, to be given as `data_dir` later; made if missing.

    Raises:
        ValueError: More games than the split has, or a folder that cannot be written.
    """
    if not 1 <= count <= tasks.len(split):
        raise ValueError(f"count must be from 1 to {tasks.len(split)}, the tasks of split {split!r}; got {count}")
    target = Path(folder) / DATA_VERSION / SPLIT_FOLDERS[split]
    try:
        return [_write_game(tasks.get(split, index), target) for index in range(count)]
    except OSError as error:
        raise ValueError(f"folder {folder} cannot be written: {error.strerror}; choose another one") from error


def _write_game(task: Task, target: Path) -> Path:
    game: GameData = task.payload
    place = target / task.id
    place.mkdir(parents=True, exist_ok=True)
    (place / "initial_state.pddl").write_text(game.problem_text, encoding="utf-8")
    (place / "traj_data.json").write_text(json.dumps(_traj_data(task), indent=2) + "\n", encoding="utf-8")
    # Last and in one move: a folder without a game file is skipped by every reader, half a file would be an error.
    path = place / "game.tw-pddl"
    with replacing(path) as partial:
        partial.write_text(json.dumps(_game_file(game)), encoding="utf-8")
    return path


def _game_file(game: GameData) -> dict[str, Any]:
    domain, grammar = DOMAIN_MARKER, marker_grammar(game.instruction)
    if importlib.util.find_spec("alfworld") is not None:
        domain, stock_grammar = stock_texts()
        # The stock grammar has a full stop of its own.
        grammar = stock_grammar.replace("UNKNOWN GOAL", game.instruction.removesuffix("."))
    return {
        "pddl_domain": domain,
        "grammar": grammar,
        "pddl_problem": game.problem_text,
        "walkthrough": oracle_solution(game),
        "solvable": True,
    }


def _traj_data(task: Task) -> dict[str, Any]:
    folder, trial = task.id.split("/")
    kind, thing, _, target, scene = folder.split("-")
    is_look = kind == LOOK
    return {
        "task_id": trial,
        "task_type": kind,
        "pddl_params": {
            "mrecep_target": "",
            "object_sliced": False,
            "object_target": thing,
            "parent_target": "" if is_look else target,
            "toggle_target": target if is_look else "",
        },
        "scene": {"floor_plan": f"FloorPlan{scene}", "scene_num": int(scene)},
        "turk_annotations": {"anns": [{"task_desc": task.payload.instruction, "high_descs": []}]},
        "difficulty": dict(task.difficulty),
    }


def run_make(argv: Sequence[str] | None = None) -> int:
    """The command `make-games`: write generated games; returns the exit code (2 for bad input)."""
    parser = argparse.ArgumentParser(prog="make-games", description="Write generated ALFWorld games as files.")
    parser.add_argument("folder", help="data folder to write; give it as data_dir or $ALFWORLD_DATA afterwards")
    for split, default in (("train", 100), ("seen", 20), ("unseen", 20)):
        parser.add_argument(
            f"--{split}", type=int, default=default, help=f"number of {split} games (default {default})"
        )
    parser.add_argument("--seed", type=int, default=0, help="another seed, other households (default 0)")
    parser.add_argument(
        "--difficulty",
        default="{}",
        help='ranges as JSON, e.g. \'{"receptacles": [2, 6], "type": "pick_and_place_simple"}\' (default: everything)',
    )
    options = parser.parse_args(argv)
    try:
        tasks = GeneratedTasks(seed=options.seed, difficulty=_json_object(options.difficulty))
        for split in SPLIT_FOLDERS:  # all of them, before anything is written
            if not 0 <= getattr(options, split) <= tasks.len(split):
                raise ValueError(f"--{split}={getattr(options, split)}: must be from 0 to {tasks.len(split)}")
        for split in SPLIT_FOLDERS:
            count = getattr(options, split)
            paths = write_games(tasks, split, count, options.folder) if count else []
            print(f"{split}: {len(paths)} games in {Path(options.folder) / DATA_VERSION / SPLIT_FOLDERS[split]}")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--difficulty must be a JSON object; got {text!r} ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"--difficulty must be a JSON object; got {text!r}")
    return value
