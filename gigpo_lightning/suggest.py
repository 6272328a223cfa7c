"""The likely meaning of a misspelt name, for messages. Knows no option and no file."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def did_you_mean(given: str, known: Sequence[str], quote: str = "", cutoff: float = 0.6) -> str:
    """`; did you mean X?` for the name in `known` that is most like `given`, X between `quote`s; or nothing.

    `cutoff` in [0, 1] is how like it must be; long names of which a part was given need less.
    """
    others = [name for name in known if name != given]  # the same name may be known elsewhere
    close = difflib.get_close_matches(given, others, n=1, cutoff=cutoff)
    return f"; did you mean {quote}{close[0]}{quote}?" if close else ""
