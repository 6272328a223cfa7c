"""A run that is ended from outside, by Ctrl-C or SIGTERM: exit code 130 or 143, and one line that says how to go on."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from lightning.pytorch.utilities.exceptions import SIGTERMException

from gigpo_lightning.paths import shown

INTERRUPTED = 128 + signal.SIGINT
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


def _how(command: str, args: Sequence[str], folder: Path | None) -> str:
    if command != "fit" or folder is None or not any(folder.glob("checkpoints/*.ckpt")):
        return ""
    configs = [
        part
        for option, value in zip(args, [*args[1:], ""], strict=True)
        if option.startswith(("--config", "-c"))
        for part in ([option] if "=" in option else [option, value])
    ]
    words = ["python -m gigpo_lightning fit", *configs, "--ckpt_path last"]
    return f": {shown(folder)} holds the finished iterations; go on with: {' '.join(words)} (and the other options)"
