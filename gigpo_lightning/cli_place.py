"""Which folder a command writes into and which checkpoint it starts from.

`--ckpt_path last` and `best` mean the newest run of the configuration that has a checkpoint. Knows folders and files;
of what is in a checkpoint only which entries there must be.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gigpo_lightning.callbacks.durable import damage, lacking, newest_complete
from gigpo_lightning.cli_errors import BAD_INPUT
from gigpo_lightning.cli_ranks import rank, tell, told
from gigpo_lightning.cli_run import RunFolder, claim, reopen, run_of_checkpoint, take, versions_of

NAMED = ("last", "best")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a command writes (`folder`), and the checkpoint it starts from (None: from the beginning)."""

    folder: RunFolder
    checkpoint: str | None


def agreed_place(decide: Callable[[], Place]) -> Place:
    """The place that the first process of the command decides on; the others take it over.

    Raises:
        SystemExit: In the others, when the first refused: it says why.
    """
    if rank() != 0:
        said = told()
        if said["folder"] is None:
            sys.exit(BAD_INPUT)
        return Place(RunFolder(Path(said["folder"]), fresh=False, shared=True), said["checkpoint"])
    try:
        place = decide()
    except BaseException:
        tell({"folder": None})
        raise
    tell({"folder": str(place.folder.path), "checkpoint": place.checkpoint})
    return place


def place_run(
    command: str,
    runs: Path,
    *,
    given_folder: str | None = None,
    wanted: str | None = None,
    checkpoints: str | None = None,
    entries: Sequence[str] = (),
) -> Place:
    """Choose folder and checkpoint of a command.

    `fit` gets a new folder `version_<k>`, or that of the run which it continues with `last`. The other commands get
    `<command>_<k>` inside the run that their checkpoint comes from.

    Args:
        command: `fit`, `validate`, `test` or `predict`.
        runs: The folder of all runs of this configuration.
        given_folder: The folder of the run, where the user names one.
        wanted: `--ckpt_path`: a file, `last`, `best` or None.
        checkpoints: The folder that `IterationCheckpoint` is told to write into; None for the run's own.
        entries: What a checkpoint must hold.

    Raises:
        ValueError: There is no such run or checkpoint, it is damaged or not one of ours; the folder holds another run
            or is in use.
        OSError: The folder cannot be written, or the disk is nearly full.
    """
    given = Path(given_folder) if given_folder else None
    option = "--trainer.default_root_dir" if given else "--runs_dir"  # what chooses another folder
    home: Path | None
    if wanted in NAMED:
        home, checkpoint = named(command, wanted, given or runs, [given] if given else versions_of(runs), checkpoints)
    else:
        checkpoint = _file(wanted)
        home = run_of_checkpoint(Path(checkpoint)) if checkpoint else None
    if checkpoint and "://" not in checkpoint and (missing := lacking(Path(checkpoint), entries)):
        raise ValueError(f"--ckpt_path {wanted}: not a checkpoint of gigpo_lightning: it lacks {', '.join(missing)}")
    if command != "fit":
        return Place(claim(given or home or runs, command, option), checkpoint)
    if wanted == "last":
        assert home is not None
        return Place(reopen(home, option), checkpoint)
    return Place(take(given, option) if given else claim(runs, "version", option), checkpoint)


def named(
    command: str, wanted: str, where: Path, runs: Sequence[Path], checkpoints: str | None
) -> tuple[Path, str | None]:
    """The run and the file that `last` or `best` means; no file for a run that `fit` must begin again.

    Args:
        command: The command.
        wanted: `last` or `best`.
        where: Where the runs are sought, for the message.
        runs: The runs, newest first.
        checkpoints: The folder of the checkpoints, where it is not the run's own.
    """
    runs = [run for run in runs if run.is_dir()]
    if not runs:
        raise ValueError(
            f"--ckpt_path {wanted}: there is no run in {where} yet; start one with fit, or name a checkpoint file"
        )
    folders = [Path(checkpoints) if checkpoints else run / "checkpoints" for run in runs]
    for run, folder in zip(runs, folders, strict=True):
        checkpoint = _best(folder) if wanted == "best" else None
        checkpoint = checkpoint or newest_complete(folder)
        if checkpoint is not None:
            if run != runs[0]:
                print(f"{runs[0]} has no whole checkpoint: {wanted} is that of {run}", file=sys.stderr)
            return run, str(checkpoint)
    # A run killed in its first iteration has nothing to continue from; one that had several checkpoints has lost them.
    if command == "fit" and len(list(folders[0].glob("*.ckpt"))) <= 1:
        print(f"no iteration of {runs[0]} was finished: it starts again from its beginning", file=sys.stderr)
        return runs[0], None
    raise ValueError(f"--ckpt_path {wanted}: there is no whole checkpoint in {folders[0]}")


def _best(folder: Path) -> Path | None:
    """The best checkpoint, if it is whole."""
    best = folder / "best.ckpt"
    if not best.exists():
        return None
    problem = damage(best)
    if problem is None:
        return best.resolve()
    print(f"checkpoint {best} is passed over: {problem}", file=sys.stderr)
    return None


def _file(wanted: str | None) -> str | None:
    """A checkpoint given by its path, checked to be whole."""
    if wanted is None or "://" in wanted:  # a remote file is Lightning's to fetch
        return wanted
    path = Path(wanted)
    if not path.exists():
        raise ValueError(f"--ckpt_path {wanted}: no such file (a path, {' or '.join(NAMED)})")
    if path.is_dir():
        raise ValueError(f"--ckpt_path {wanted}: a folder; name a checkpoint file, {' or '.join(NAMED)}")
    problem = damage(path)
    if problem is not None:
        raise ValueError(f"--ckpt_path {wanted}: not a whole checkpoint: {problem}")
    return str(path)


def checkpoint_folder(callbacks: Any) -> str | None:
    """The folder that `IterationCheckpoint` is told to write into, in the list of callbacks as it is parsed."""
    for callback in callbacks if isinstance(callbacks, list) else [callbacks]:
        if callback and callback["class_path"].rsplit(".")[-1] == "IterationCheckpoint":
            folder: str | None = (callback.get("init_args") or {}).get("folder")
            return folder
    return None
