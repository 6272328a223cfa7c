"""The recorded games, read unchanged from the folder that `alfworld-download` fills.

Which games count follows the original loader: no movable receptacles, no slicing, solvable ones only. Their order is
sorted, not the file system's.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from gigpo_lightning.envs.alfworld.game import read_game_file, read_json, read_text
from gigpo_lightning.envs.alfworld.goals import TASK_TYPES
from gigpo_lightning.envs.alfworld.rooms import FIRST_SCENE

DATA_VERSION = "json_2.1.1"
SPLIT_FOLDERS = {"train": "train", "seen": "valid_seen", "unseen": "valid_unseen"}
DEFAULT_FOLDER = "~/.cache/alfworld"
_SKIPPED = ("movable", "Sliced")
_SOLVABLE = re.compile(r'"solvable"\s*:\s*(true|false)')
_TASK_TYPE = re.compile(r'"task_type"\s*:\s*"([a-z_]+)"')


@dataclass(frozen=True, slots=True)
class RecordedGame:
    """Where a game file is, what kind of task it sets, and in what kind of room."""

    path: str
    id: str
    type: str
    room: str


def find_data(data_dir: str | None) -> Path:
    """The folder with the recorded games: `data_dir`, else `$ALFWORLD_DATA`, else `~/.cache/alfworld`.

    Raises:
        ValueError: There are no games; the message has the commands that fetch them.
    """
    given = data_dir or os.environ.get("ALFWORLD_DATA") or DEFAULT_FOLDER
    source = (
        "data_dir" if data_dir else "$ALFWORLD_DATA" if os.environ.get("ALFWORLD_DATA") else "the default data folder"
    )
    folder = Path(given).expanduser()
    folder = folder if folder.name == DATA_VERSION else folder / DATA_VERSION
    if not folder.is_dir():
        raise ValueError(
            f"no ALFWorld games: {source} is {given}, and {folder} does not exist. Fetch the games with\n"
            "  pip install alfworld\n  alfworld-download\n"
            "or set data_dir to the folder that holds json_2.1.1, or use generated games (GeneratedTasks)."
        )
    return folder


def list_games(folder: Path, split: str) -> list[RecordedGame]:
    """The games of a split, sorted by path.

    Raises:
        ValueError: A corrupted file, or no games; the message names the file or folder.
    """
    root = folder / SPLIT_FOLDERS[split]
    found = []
    for path in sorted(root.glob("*/*/game.tw-pddl")):
        name = path.relative_to(root).parent.as_posix()
        if not any(word in name for word in _SKIPPED) and _is_solvable(path):
            kind = _task_type(path.with_name("traj_data.json"))
            if kind in TASK_TYPES:
                found.append(RecordedGame(str(path), name, kind, _room(name)))
    if not found:
        raise ValueError(f"split {split!r} has no games: {root} holds no solvable game.tw-pddl of the six task types")
    return found


def _is_solvable(path: Path) -> bool:
    # Looked up in the text, as parsing thousands of files of 100 kB would take a minute; what is odd is parsed.
    match = _SOLVABLE.search(read_text(path, errors="replace"))
    if match:
        return match[1] == "true"
    return bool(read_game_file(path).get("solvable"))


def _task_type(path: Path) -> str:
    match = _TASK_TYPE.search(read_text(path))
    return match[1] if match else str(read_json(path).get("task_type", ""))


def _room(name: str) -> str:
    """The kind of room, from the floor plan's number at the end of the task folder."""
    number = name.split("/")[0].rsplit("-", 1)[-1]
    scene = int(number) if number.isdigit() else 0
    return [room for room, first in FIRST_SCENE.items() if first <= max(scene, 1)][-1]
