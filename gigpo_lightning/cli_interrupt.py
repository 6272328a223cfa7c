"""A run that is ended from outside, by Ctrl-C or SIGTERM: exit code 130 or 143, and one line that says how to go on."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from lightning.pytorch.utilities.exceptions import SIGTERMException

from gigpo_lightning.paths import shown

INTERRUPTED = 128 + signal.SIGINT
_CONFIG = "config.yaml"  # in a run's folder once its first iteration is near
_PLACING = ("--config", "-c", "--runs_dir", "--trainer.default_root_dir")  # by these a run is found again
_SAID = {signal.SIGINT: "interrupted", signal.SIGTERM: "told to end (SIGTERM)"}


def signal_of(error: BaseException) -> signal.Signals | None:
    """The signal that ended the run; None where none did. Of Ctrl-C the trainer makes an exit."""
    if isinstance(error, SIGTERMException):
        return signal.SIGTERM
    exits = isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt)
    return signal.SIGINT if exits or isinstance(error, KeyboardInterrupt) else None


def end_by(number: signal.Signals, command: str, args: Sequence[str], folder: Path | None, say: bool) -> NoReturn:
    """Say how to go on, and leave with 128 + the signal's number, as shells call it.

    Args:
        number: The signal.
        command: The command.
        args: The rest of its command line.
        folder: The run's folder; None where it has not got that far.
        say: Whether this process speaks for all.
    """
    if say:
        print(f"{_SAID[number]}{_how(command, args, folder)}", file=sys.stderr)
    sys.exit(128 + number)


@contextmanager
def sigterm_ends() -> Iterator[None]:
    """While this lasts, SIGTERM raises `SIGTERMException` at once, as Ctrl-C raises KeyboardInterrupt.

    The trainer's own handler, which waits for the end of a batch, calls this one, too. One that the program has set
    before is left alone.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    raise SIGTERMException


def _how(command: str, args: Sequence[str], folder: Path | None) -> str:
    if command != "fit" or folder is None or not (folder / _CONFIG).exists():
        return ""
    placing = [
        part
        for option, value in zip(args, [*args[1:], ""], strict=True)
        if option.partition("=")[0] in _PLACING
        for part in ([option] if "=" in option else [option, value])
    ]
    words = ["python -m gigpo_lightning fit", *placing, "--ckpt_path last"]
    held = "the finished iterations" if any(folder.glob("checkpoints/*.ckpt")) else "the run"
    return f": {shown(folder)} holds {held}; go on with: {' '.join(words)} (and the other options)"
