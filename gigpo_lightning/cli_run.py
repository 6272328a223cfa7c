"""Where a run is kept: `<runs_dir>/<name>/version_<k>` with its checkpoints, TensorBoard files and results.

Knows folders and files; nothing about models. A folder is claimed by making it and held by a lock, so that two runs
never share one, and is left as it was found when nothing came of the run.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

if sys.platform != "win32":
    import fcntl

# Below this a run is refused at its start: a few checkpoints of a small policy and the rollouts of two iterations.
MIN_FREE_MB = 200
_LOCK = ".lock"
_OPTION = "--runs_dir"  # what chooses another folder for a run
# What a run writes before its first iteration; anything else in a folder is worth keeping.
_EARLY_FILES = ("events.out.tfevents.*", "hparams.yaml", "config.yaml", _LOCK)
# By these a folder is known to hold a run; other files in it are the user's own.
_RUN_FILES = ("config.yaml", "results.json", "anchors.arrow", "checkpoints/*.ckpt")


@dataclass(slots=True)
class RunFolder:
    """A folder that this process writes into.

    Args:
        path: The folder.
        fresh: Whether this process made it.
        made: The parents it had to make, outermost first.
        before: What the folder held already.
        lock: The open lock file; None for a folder that is not locked.
        shared: Whether it is another process of the same command that made or took it, and looks after it.
    """

    path: Path
    fresh: bool
    made: tuple[Path, ...] = ()
    before: frozenset[Path] = frozenset()
    lock: int | None = None
    shared: bool = False

    def discard(self) -> None:
        """Remove what this process has written, unless that is more than a run writes before its first iteration."""
        if self.shared:
            return
        new = [path for path in self.path.rglob("*") if path not in self.before]
        early = [path for pattern in _EARLY_FILES for path in self.path.glob(pattern)]
        if any(path not in early and not path.is_dir() for path in new):
            return
        for path in sorted(new, reverse=True):  # what is inside a folder comes before it
            path.rmdir() if path.is_dir() else path.unlink()
        if self.fresh:
            for folder in (self.path, *reversed(self.made)):
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()

    def release(self) -> None:
        """Let others write here; the end of the process does the same."""
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None


def claim(parent: Path, prefix: str, option: str = _OPTION) -> RunFolder:
    """Make the next free folder `parent/<prefix>_<k>`, having checked that it can be written.

    Args:
        parent: Where it is made.
        prefix: The beginning of its name.
        option: The option that chooses another place.

    Raises:
        OSError: The place is read-only or nearly full; the message says what to do.
    """
    check_space(parent, option)
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
        raise _unwritable(error, parent, option) from error
    return _opened(RunFolder(path, fresh=True, made=made), option)


def take(path: Path, option: str = _OPTION) -> RunFolder:
    """Use the folder that the user named for something new; it is made where it is missing.

    Args:
        path: The folder.
        option: The option that chooses another one.

    Raises:
        ValueError: It holds a run, or another process writes into it.
        OSError: The place is read-only or nearly full; the message says what to do.
    """
    check_space(path, option)
    made, fresh = _missing(path.parent), not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(error, path, option) from error
    folder = _opened(RunFolder(path, fresh, made, _content(path)), option)
    if not any(file for pattern in _RUN_FILES for file in path.glob(pattern)):
        return folder
    folder.discard()
    folder.release()
    state = "a finished" if (path / "results.json").exists() else "an unfinished"
    raise ValueError(
        f"{path} holds {state} run: fit with --ckpt_path last goes on with it; for another one choose another folder "
        f"with {option}"
    )


def reopen(path: Path, option: str = _OPTION) -> RunFolder:
    """Go on in the folder of a run; `option` chooses another one.

    Raises:
        ValueError: Another process writes into it.
        OSError: It is read-only or the disk nearly full; the message says what to do.
    """
    check_space(path, option)
    return _opened(RunFolder(path, fresh=False, before=_content(path)), option)


def check_space(folder: Path, option: str = _OPTION) -> None:
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
            f"or choose another folder with {option}",
            str(folder),
        )


def check_writable(folder: Path, option: str = _OPTION) -> None:
    """Write and remove a small file in an existing folder.

    Raises:
        OSError: It cannot be written; the message names the folder.
    """
    probe = folder / f".write-test-{os.getpid()}"
    try:
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise _unwritable(error, folder, option) from error


def versions_of(runs: Path) -> list[Path]:
    """The run folders in `<runs_dir>/<name>`, newest first."""
    versions = [path for path in runs.glob("version_*") if path.is_dir() and number_of(path) >= 0]
    return sorted(versions, key=number_of, reverse=True)


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


def _unwritable(error: OSError, folder: Path, option: str) -> OSError:
    return OSError(
        error.errno, f"cannot write here: {error.strerror}; choose another folder with {option}", str(folder)
    )


def _missing(folder: Path) -> tuple[Path, ...]:
    """The folders that are still to be made for `folder`, outermost first."""
    return tuple(reversed([p for p in (folder, *folder.parents) if not p.exists()]))


def _content(folder: Path) -> frozenset[Path]:
    return frozenset(folder.rglob("*"))


def _opened(folder: RunFolder, option: str) -> RunFolder:
    """The folder, locked, if it can be written; else nothing is left of it."""
    try:
        check_writable(folder.path, option)
        folder.lock = _locked(folder.path, option)
    except OSError:
        folder.discard()
        raise
    return folder


def _locked(folder: Path, option: str) -> int | None:
    """The lock of a folder, held until it is closed or the process dies; None where the file system has no locks.

    Raises:
        ValueError: Another process holds it.
    """
    if sys.platform == "win32":
        return None
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            raise ValueError(
                f"{folder} is in use: another process writes into it; wait for its end, or choose another folder with "
                f"{option}"
            ) from error
        return None
    return lock
