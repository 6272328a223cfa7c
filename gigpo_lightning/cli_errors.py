"""Bad input becomes one clear message on stderr and exit code 2; the parser's messages become readable.

Knows the parser's wording; nothing about what the options mean.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

BAD_INPUT = 2


def fail(message: str) -> NoReturn:
    """Print the message and leave with exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(BAD_INPUT)


def show_traceback() -> bool:
    """Whether the user asked to see where errors come from (`GIGPO_TRACEBACK=1`)."""
    return os.environ.get("GIGPO_TRACEBACK", "") not in ("", "0")


def option_message(message: str, known: Sequence[str]) -> str:
    return "RAW<<" + message + ">>"
