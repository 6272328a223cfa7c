"""Which exceptions are bad input, and how they read. Knows exception types; nothing about what the options mean."""

from __future__ import annotations

import errno
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning
import yaml
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import gigpo_lightning
from gigpo_lightning.cli_errors import show_traceback

# What constructors and set-up raise for options they cannot use.
BAD_INPUT_TYPES = (ValueError, TypeError, OSError, ImportError, NotImplementedError, MisconfigurationException)
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.EIO)
_OTHER_MODEL = "Error(s) in loading state_dict"
# What torch's exchange between processes says when one of them is gone: gloo, NCCL and the store.
_LOST = re.compile(r"gloo|connection (closed|reset|refused)|broken pipe|nccl|recvValue failed", re.IGNORECASE)


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
        """The constructor's error where `error` only reports that one, and this package does not explain it."""
        first = None if _raised_by(error, gigpo_lightning) else self.first_error
        return first if first is not None and _one_line(first) in _one_line(error) else error


def is_bad_input(error: Exception, begun: bool) -> bool:
    """Whether an error is the user's to mend and needs no traceback.

    Args:
        error: The exception.
        begun: Whether the trainer has begun its work. Before, every error of a common type comes from the options;
            later only a full or read-only disk, and what this package raises on purpose.
    """
    if not begun:
        return isinstance(error, BAD_INPUT_TYPES) or str(error).startswith(_OTHER_MODEL)
    disk = isinstance(error, OSError) and error.errno in _DISK_ERRORS
    return disk or (isinstance(error, (ValueError, OSError)) and _raised_by(error, gigpo_lightning))


def end_if_left_alone(error: Exception, rank: int) -> None:
    """End with one line where an exchange failed because another process of the run has ended."""
    lost = isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None and _raised_by_torch(error)
    if lost and not show_traceback():
        print(f"process {rank}: another process of this run has ended; its own message says why", file=sys.stderr)
        sys.exit(1)


def _raised_by_torch(error: Exception) -> bool:
    """Whether the innermost line is one of torch.distributed."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and "distributed" in Path(frames[-1].filename).parts


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
    if isinstance(error.__cause__, yaml.YAMLError):
        text = text.replace(str(error.__cause__), yaml_problem(error.__cause__))
    explained = _raised_by(error, gigpo_lightning) or _raised_by(error, lightning)
    return text if explained else f"{text} (GIGPO_TRACEBACK=1 shows where this comes from)"


def yaml_problem(error: yaml.YAMLError) -> str:
    """What is wrong with a YAML text, and in which line, in place of PyYAML's five lines."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return _one_line(error)
    return f"line {mark.line + 1}, column {mark.column + 1}: {getattr(error, 'problem', None) or 'not YAML'}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _raised_by(error: Exception, package: ModuleType) -> bool:
    """Whether the error comes from a `raise` statement of the package: its text was written for users."""
    frames = traceback.extract_tb(error.__traceback__)
    return (
        bool(frames)
        and Path(str(package.__file__)).parent in Path(frames[-1].filename).parents
        and (frames[-1].line or "").startswith("raise")
    )
