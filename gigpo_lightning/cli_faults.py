"""Which exceptions are bad input, and how they read. Knows exception types; nothing about what the options mean."""

from __future__ import annotations

import errno
import traceback
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException

import gigpo_lightning

# What constructors and set-up raise for options they cannot use.
BAD_INPUT_TYPES = (ValueError, TypeError, OSError, ImportError, MisconfigurationException)
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.EIO)
_OTHER_MODEL = "Error(s) in loading state_dict"


class Constructors:
    """Builds what the configuration names and remembers the first error.

    jsonargparse tries a value against several types and reports that none fits; the constructor's own error says more.
    """

    def __init__(self) -> None:
        self.first_error: Exception | None = None

    def build(self, class_type: type, *args: Any, **kwargs: Any) -> Any:
        """Call the constructor."""
        try:
            return class_type(*args, **kwargs)
        except BAD_INPUT_TYPES as error:
            self.first_error = self.first_error or error
            raise

    def cause(self, error: Exception) -> Exception:
        """The constructor's error where `error` only reports that one."""
        first = self.first_error
        return first if first is not None and str(first) in str(error) else error


def is_bad_input(error: Exception) -> bool:
    """Whether an error raised before the first batch comes from the options."""
    return isinstance(error, BAD_INPUT_TYPES) or str(error).startswith(_OTHER_MODEL)


def is_disk_error(error: Exception) -> bool:
    """Whether an error raised in the middle of a run comes from a full or read-only disk."""
    return isinstance(error, OSError) and error.errno in _DISK_ERRORS


def message(error: Exception, folder: Path | None) -> str:
    """One short text for the user.

    Args:
        error: The exception.
        folder: Where the run writes, for errors of the disk that do not say where.
    """
    if str(error).startswith(_OTHER_MODEL):
        details = [line.strip() for line in str(error).splitlines()[1:]]
        return f"--ckpt_path: the checkpoint is of another model: {details[0] if details else error}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or folder or 'disk'}: {error.strerror}"
    text = str(error).strip() or type(error).__name__
    return text if _is_explained(error) else f"{text} (GIGPO_TRACEBACK=1 shows where this comes from)"


def _is_explained(error: Exception) -> bool:
    """Whether the error was raised by code that writes its messages for users: this package, or Lightning's checks."""
    frames = traceback.extract_tb(error.__traceback__)
    own = Path(gigpo_lightning.__file__).parent
    return isinstance(error, MisconfigurationException) or not frames or own in Path(frames[-1].filename).parents
