"""The likely meaning of a misspelt name, for messages. Knows no option and no file."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def did_you_mean(given: str, known: Sequence[str], quote: str = "") -> str:
    """`; did you mean X?` for the name in `known` that is most like `given`, X between `quote`s; or nothing."""
    close = difflib.get_close_matches(given, known, n=1)
    return f"; did you mean {quote}{close[0]}{quote}?" if close else ""
