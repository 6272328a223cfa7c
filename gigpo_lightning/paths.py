"""Paths as a user reads them."""

from __future__ import annotations

from pathlib import Path


def shown(path: str | Path) -> str:
    """The path as it would be typed: relative where it lies under the working folder, as it is elsewhere."""
    path = Path(path)
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
