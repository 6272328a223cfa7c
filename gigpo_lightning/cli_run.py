"""Where a run is kept: `<runs_dir>/<name>/version_<k>` with its checkpoints, TensorBoard files and results.

Knows folders and checkpoint files; nothing about models. A folder is claimed by making it, so that two runs that
start together never share one, and is removed again when nothing came of the run.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

# Below this a run is refused at its start: a few checkpoints of a small policy and the rollouts of two iterations.
MIN_FREE_MB = 200
# Processes that Lightning starts for further devices must not claim a folder of their own.
_FOLDER_VARIABLE = "GIGPO_RUN_FOLDER"
# What a run writes before its first iteration; anything else in a folder is worth keeping.
_EARLY_FILES = ("events.out.tfevents.*", "hparams.yaml", "config.yaml")
_EARLY_FOLDERS = ("checkpoints", "rollouts")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A claimed folder; `fresh` where this process made it, `made` the parents it had to make (outermost first)."""

    path: Path
    fresh: bool
    made: tuple[Path, ...] = ()

    def discard(self) -> None:
        """Remove the folder unless it is an older run's or holds more than a run writes before its first iteration."""
        early = [file for pattern in _EARLY_FILES for file in self.path.glob(pattern)]
        if not self.fresh or any(file.is_file() and file not in early for file in self.path.rglob("*")):
            return
        for file in early:
            file.unlink()
        for folder in (*(self.path / name for name in _EARLY_FOLDERS), self.path, *reversed(self.made)):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        os.environ.pop(_FOLDER_VARIABLE, None)


def claim(parent: Path, prefix: str) -> RunFolder:
    """Make the next free folder `parent/<prefix>_<k>`, having checked that it can be written.

    Raises:
        OSError: The place is read-only or nearly full; the message says what to do.
    """
    inherited = os.environ.get(_FOLDER_VARIABLE)
    if inherited and "LOCAL_RANK" in os.environ:
        return RunFolder(Path(inherited), fresh=False)
    check_space(parent)
    made = _missing(parent)
    number = max((number_of(p) for p in parent.glob(f"{prefix}_*")), default=-1)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        while True:
            number += 1
            path = parent / f"{prefix}_{number}"
            try:
                path.mkdir()
                break
            except FileExistsError:  # another run was quicker
                continue
    except OSError as error:
        raise _unwritable(error, parent) from error
    os.environ[_FOLDER_VARIABLE] = str(path)
    return _checked(RunFolder(path, fresh=True, made=made))


def take(path: Path) -> RunFolder:
    """Use the folder that the user named, made where it is missing.

    Raises:
        OSError: The place is read-only or nearly full; the message says what to do.
    """
    check_space(path)
    made, fresh = _missing(path.parent), not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(error, path) from error
    return _checked(RunFolder(path, fresh=fresh, made=made))


def check_space(folder: Path) -> None:
    """Refuse a disk with less than `MIN_FREE_MB` left.

    Raises:
        OSError: Too little space; the message names the folder.
    """
    existing = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    free_mb = shutil.disk_usage(existing).free / 2**20
    if free_mb < MIN_FREE_MB:
        raise OSError(
            errno.ENOSPC,
            f"the disk is nearly full: {free_mb:.0f} MB are free, a run needs {MIN_FREE_MB} MB; free some space "
            "or choose another folder with --runs_dir",
            str(folder),
        )


def check_writable(folder: Path) -> None:
    """Write and remove a small file in an existing folder.

    Raises:
        OSError: It cannot be written; the message names the folder.
    """
    probe = folder / f".write-test-{os.getpid()}"
    try:
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise _unwritable(error, folder) from error


def newest_version(runs: Path) -> Path | None:
    """The run folder with the highest number in `<runs_dir>/<name>`; None where there is none."""
    versions = [p for p in runs.glob("version_*") if p.is_dir() and number_of(p) >= 0]
    return max(versions, key=number_of, default=None)


def run_of_checkpoint(checkpoint: Path) -> Path | None:
    """The run folder that a checkpoint lies in; None for a checkpoint kept elsewhere."""
    for parent in checkpoint.absolute().parents:
        if re.fullmatch(r"version_\d+", parent.name):
            return parent
    return None


def number_of(folder: Path) -> int:
    """k of `version_<k>` or `test_<k>`; −1 for another name."""
    match = re.fullmatch(r"[a-z]+_(\d+)", folder.name)
    return int(match[1]) if match else -1


def _unwritable(error: OSError, folder: Path) -> OSError:
    return OSError(
        error.errno, f"cannot write here: {error.strerror}; choose another folder with --runs_dir", str(folder)
    )


def _missing(folder: Path) -> tuple[Path, ...]:
    """The folders that are still to be made for `folder`, outermost first."""
    return tuple(reversed([p for p in (folder, *folder.parents) if not p.exists()]))


def _checked(folder: RunFolder) -> RunFolder:
    """The folder, if it can be written; else nothing is left of it."""
    try:
        check_writable(folder.path)
    except OSError:
        folder.discard()
        raise
    return folder
