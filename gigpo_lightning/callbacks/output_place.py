"""Whether an output can be written where an option says, asked before hours of work go into it. Leaves nothing."""

from __future__ import annotations

import os
from pathlib import Path


def check_file(path: Path, option: str) -> None:
    """Refuse a place where no file can be written; see `check_folder`.

    Raises:
        ValueError: It is a folder, or cannot be written; the message begins with `option`.
    """
    if path.is_dir():
        raise ValueError(f"{option}: {path} is a folder; give the name of a file")
    check_folder(path.parent, option)


def check_folder(folder: Path, option: str) -> None:
    """Refuse a folder that cannot be written. Where it is missing, it is not made yet: what exists above it is tried.

    Args:
        folder: The folder, which may be missing.
        option: The option and its value, for the message.

    Raises:
        ValueError: A file stands where a folder should be, or writing is not possible.
    """
    try:
        existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(place))
        if not existing.is_dir():
            raise ValueError(f"{option}: {existing} is not a folder; choose another place")
        probe = existing / f".write-test-{os.getpid()}"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise ValueError(f"{option}: cannot write in {folder}: {error.strerror}; choose another place") from error
