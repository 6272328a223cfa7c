"""Checkpoint files that are whole or absent: written beside their name, brought to disk, then moved over it.

Knows files and torch's format; which checkpoints are made and kept is `IterationCheckpoint`'s business.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.rank_zero import rank_zero_warn

_NUMBERED = re.compile(r"^iteration=(\d+)\.ckpt$")
_PARTIAL = ".partial"


class DurableCheckpointIO(TorchCheckpointIO):
    """Lightning's plugin with a durable write; killed, its own leaves a copy behind in the temporary folder."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write `checkpoint` to the local file `path`.

        Raises:
            OSError: The folder cannot be written or the disk is full; the message names the folder.
        """
        if storage_options is not None:
            raise TypeError(f"storage_options is {storage_options!r}, but DurableCheckpointIO takes none")
        path = Path(path)
        partial = _partial(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            _sync_folder(path.parent)
        except (OSError, RuntimeError) as error:
            _remove_quietly(partial)
            raise _explained(error, path.parent) from error


def require_writable(folder: Path) -> None:
    """Make `folder` and try it, so that a run ends before its first iteration and not after.

    Raises:
        OSError: The folder cannot be made or written.
    """
    probe = folder / f".probe{_PARTIAL}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OSError(
            error.errno, f"cannot write checkpoints: {error.strerror}; choose another folder", str(folder)
        ) from error


def numbered_path(folder: Path, iteration: int) -> Path:
    """The file of the checkpoint after `iteration` iterations."""
    return folder / f"iteration={iteration:06d}.ckpt"


def iteration_of(path: str | Path) -> int | None:
    """The number of iterations done in a numbered checkpoint; None for any other file."""
    match = _NUMBERED.match(Path(path).name)
    return int(match[1]) if match else None


def newest_complete(folder: str | Path) -> Path | None:
    """The newest checkpoint of `folder` that can be read to its end, or None.

    `last.ckpt` comes first, then the numbered files from the latest down. Partial files are never looked at; a damaged
    checkpoint is passed over with a warning.
    """
    folder = Path(folder)
    numbered = {path: number for path in folder.glob("*.ckpt") if (number := iteration_of(path)) is not None}
    last = folder / "last.ckpt"
    candidates = [last.resolve()] if last.exists() else []
    for path in dict.fromkeys(candidates + sorted(numbered, key=lambda path: numbered[path], reverse=True)):
        problem = damage(path)
        if problem is None:
            return path
        rank_zero_warn(f"checkpoint {path} is passed over: {problem}")
    return None


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint file: None if it is a whole zip that torch reads with `weights_only`."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            return f"its part {damaged} is damaged"
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # noqa: BLE001 — changed bytes can make the reader fail in any way
        return f"{type(error).__name__}: {error}"
    return None


def lacking(path: Path, entries: Sequence[str]) -> list[str]:
    """Those of `entries` that a whole file lacks; all of them where it holds no table of entries at all."""
    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return [entry for entry in entries if not isinstance(content, dict) or entry not in content]


def link(name: Path, target: str) -> None:
    """Point `name` to its neighbour `target` in one step; a copy where the file system has no links."""
    partial = _partial(name)
    partial.unlink(missing_ok=True)
    try:
        partial.symlink_to(target)
    except OSError:
        shutil.copyfile(name.with_name(target), partial)
    partial.replace(name)
    _sync_folder(name.parent)


def remove_partial(folder: Path) -> None:
    """Remove what a killed run left half-written."""
    for path in folder.glob(f".*.ckpt{_PARTIAL}"):
        path.unlink()


def move_aside(folder: Path) -> Path | None:
    """Move the checkpoints in `folder` into the next free `earlier-N` and return that; None if there are none."""
    names = ("last.ckpt", "best.ckpt")
    old = [path for path in folder.glob("*.ckpt") if iteration_of(path) is not None or path.name in names]
    if not old:
        return None
    number = 1
    while (folder / f"earlier-{number}").exists():
        number += 1
    aside = folder / f"earlier-{number}"
    aside.mkdir()
    # Links first: were the run killed here, `last.ckpt` must not point to nothing.
    for path in sorted(old, key=lambda path: path.name not in names):
        path.replace(aside / path.name)
    return aside


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}{_PARTIAL}")


def _sync_folder(folder: Path) -> None:
    """Bring a rename to disk; Windows cannot open a folder and needs no such call."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _remove_quietly(path: Path) -> None:
    """Remove a leftover; where even that fails (a read-only folder), the error that led here says more."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return


def _explained(error: Exception, folder: Path) -> Exception:
    """An `OSError` that names the folder; an error that does not come from the disk as it is.

    torch turns a failed write into a RuntimeError about positions, with the cause as its context.
    """
    cause = error if isinstance(error, OSError) else error.__context__
    if not isinstance(cause, OSError):
        return error
    hint = "free some space and " if cause.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return OSError(
        cause.errno, f"cannot write a checkpoint: {cause.strerror}; {hint}resume with ckpt_path: last", str(folder)
    )
