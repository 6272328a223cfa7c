"""Files that are whole or not there: written beside their name, then moved over it.

Knows nothing of their content. Checkpoints, which must outlive a power failure, too, have `callbacks.durable`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A place to write in; at the end it takes the name `path`, and where anything fails nothing is left of it.

    Raises:
        OSError: The folder cannot be made or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: dict[str, Any]) -> Path:
    """Write readable JSON; returns `path`.

    Raises:
        OSError: The folder cannot be made or written.
        TypeError: The content has a value that JSON does not know.
    """
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
    return path
