"""Which folder a command writes into and which checkpoint it starts from.

`--ckpt_path last` and `best` mean the newest run of the configuration. Knows folders and checkpoint files; what is in a
checkpoint is checked by those who load it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from gigpo_lightning.callbacks.durable import damage, newest_complete
from gigpo_lightning.cli_run import (
    RunFolder,
    check_space,
    check_writable,
    claim,
    newest_version,
    run_of_checkpoint,
    take,
)

NAMED = ("last", "best")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a command writes (`folder`), and the checkpoint it starts from (None: from the beginning)."""

    folder: RunFolder
    checkpoint: str | None


def place_run(command: str, runs: Path, *, given_folder: str | None = None, wanted: str | None = None) -> Place:
    """Choose folder and checkpoint of a command.

    `fit` gets a new folder `version_<k>`, or the newest one if it continues that with `last`. The other commands get
    `<command>_<k>` inside the run that their checkpoint comes from.

    Args:
        command: `fit`, `validate`, `test` or `predict`.
        runs: The folder of all runs of this configuration.
        given_folder: The folder to write into, where the user names one.
        wanted: `--ckpt_path`: a file, `last`, `best` or None.

    Raises:
        ValueError: There is no such run or checkpoint, or it is damaged.
        OSError: The folder cannot be written, or the disk is nearly full.
    """
    run = Path(given_folder) if given_folder else newest_version(runs)
    checkpoint = _named(command, wanted, run, runs) if wanted in NAMED else _file(wanted)
    if command == "fit" and wanted == "last":
        assert run is not None
        check_space(run)
        check_writable(run)
        return Place(RunFolder(run, fresh=False), checkpoint)
    if given_folder:
        return Place(take(Path(given_folder)), checkpoint)
    if command == "fit":
        return Place(claim(runs, "version"), checkpoint)
    home = run_of_checkpoint(Path(checkpoint)) if checkpoint else None
    return Place(claim(home or runs, command), checkpoint)


def _named(command: str, wanted: str | None, run: Path | None, runs: Path) -> str | None:
    """The file that `last` or `best` means; None for a run that `fit` must begin again."""
    if run is None or not run.is_dir():
        raise ValueError(
            f"--ckpt_path {wanted}: there is no run in {runs} yet; start one with fit, or give the path of a checkpoint"
        )
    folder = run / "checkpoints"
    best = folder / "best.ckpt"
    if wanted == "best" and best.exists():
        problem = damage(best)
        if problem is None:
            return str(best.resolve())
        print(f"checkpoint {best} is passed over: {problem}", file=sys.stderr)
    newest = newest_complete(folder)
    if newest is not None:
        return str(newest)
    # A run killed in its first iteration has nothing to continue from; one that had several checkpoints has lost them.
    if command == "fit" and len(list(folder.glob("*.ckpt"))) <= 1:
        print(f"no iteration of {run} was finished: it starts again from its beginning", file=sys.stderr)
        return None
    raise ValueError(f"--ckpt_path {wanted}: there is no whole checkpoint in {folder}")


def _file(wanted: str | None) -> str | None:
    """A checkpoint given by its path, checked to be whole."""
    if wanted is None or "://" in wanted:  # a remote file is Lightning's to fetch
        return wanted
    path = Path(wanted)
    if not path.exists():
        raise ValueError(f"--ckpt_path {wanted}: no such file (a path, {' or '.join(NAMED)})")
    problem = None if path.is_dir() else damage(path)  # a folder is a sharded checkpoint
    if problem is not None:
        raise ValueError(f"--ckpt_path {wanted}: not a whole checkpoint: {problem}")
    return str(path)
