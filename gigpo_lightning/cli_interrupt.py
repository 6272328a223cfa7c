"""A run that its user ends with Ctrl-C: exit code 130, and one line that says how to go on."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from gigpo_lightning.paths import shown

INTERRUPTED = 128 + signal.SIGINT


def is_interrupt(error: BaseException) -> bool:
    """Whether Ctrl-C ended the run; the trainer makes an exit of it."""
    return isinstance(error, KeyboardInterrupt) or (
        isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt)
    )


def end_interrupted(command: str, args: Sequence[str], folder: Path | None, say: bool) -> NoReturn:
    """Say how to go on, and leave.

    Args:
        command: The command.
        args: The rest of its command line.
        folder: The run's folder; None where it has not got that far.
        say: Whether this process speaks for all.
    """
    if say:
        print(f"interrupted{_how(command, args, folder)}", file=sys.stderr)
    sys.exit(INTERRUPTED)


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
