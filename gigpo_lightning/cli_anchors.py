"""The command `anchors`: what an anchor library holds, for the eye or as JSON. Reads the library's file only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gigpo_lightning.callbacks.anchor_table import FILE, AnchorTable
from gigpo_lightning.cli_errors import ShortParser

SORTS = ("visits", "return", "spread", "recent")


def run_anchors(args: Sequence[str]) -> int:
    """Print the first anchors of a library in the order asked for.

    Args:
        args: The command line after `anchors`.

    Returns:
        0.

    Raises:
        ValueError: There is no library where `PATH` says, or it cannot be read, or a bad option.
    """
    parser = ShortParser(prog="python -m gigpo_lightning anchors", allow_abbrev=False)
    parser.add_argument("path", type=Path, metavar="PATH", help=f"a library's file, or the folder of a run with {FILE}")
    parser.add_argument("--top", type=int, default=20, metavar="N", help="number of anchors to print (20)")
    parser.add_argument(
        "--sort",
        choices=SORTS,
        default="visits",
        help="most visits, highest mean return, widest spread of returns, or seen last (visits)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(list(args))
    if options.top < 1:
        raise ValueError(f"--top {options.top}: must be at least 1")
    path = _library(options.path)
    table = AnchorTable.load(path)
    rows = [describe(table, row) for row in ordered(table, options.sort)[: options.top]]
    if options.json:
        print(json.dumps({"library": str(path), "scope": table.scope, "size": len(table), "anchors": rows}, indent=2))
        return 0
    print(f"{path}: {len(table):,} anchors, {int(table.visits.sum()):,} visits; one anchor is of one {table.scope}")
    if rows:
        Console().print(_shown(rows))
    return 0


def _library(path: Path) -> Path:
    """The library's file.

    Raises:
        ValueError: It is not there.
    """
    if path.is_dir():
        path, folder = path / FILE, path
        if not path.is_file():
            raise ValueError(
                f"{folder}: there is no {FILE} in it; AnchorLibrary in trainer.callbacks writes it when training ends, "
                "into the run's folder or where its save_to says"
            )
    elif not path.is_file():
        raise ValueError(f"{path}: no such file; name a library's file or the folder of a run")
    return path


def ordered(table: AnchorTable, sort: str) -> list[int]:
    """All rows in the order asked for; of equals the more visited first, then the older. Unvisited rows come last."""
    key = {
        "visits": table.visits,
        "return": table.mean,
        "spread": table.variance(),
        "recent": table.last_seen,
    }[sort]
    by = np.lexsort((np.arange(len(table)), -table.visits, -key, table.visits == 0))
    return [int(row) for row in by]


def describe(table: AnchorTable, row: int) -> dict[str, Any]:
    """One anchor as plain values; a mean needs a visit, a standard deviation two."""
    visits = int(table.visits[row])
    return {
        "key": table.keys[row],
        "text": table.texts[row],
        "stage": table.stages[row],
        "visits": visits,
        "return_mean": float(table.mean[row]) if visits else None,
        "return_std": float(np.sqrt(table.variance()[row])) if visits > 1 else None,
        "first_seen": int(table.first_seen[row]),
        "last_seen": int(table.last_seen[row]),
    }


def _shown(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("visits", "return", "± std", "seen", "stage", "text")
    for row in rows:
        mean, std = (f"{row[key]:.3f}" if row[key] is not None else "–" for key in ("return_mean", "return_std"))
        seen = f"{row['first_seen']}–{row['last_seen']}"
        table.add_row(f"{row['visits']:,}", mean, std, seen, _plain(row["stage"]), _plain(row["text"]))
    return table


def _plain(text: str) -> Text:
    """One line of what the world said: its brackets are no markup, and what a terminal would obey is left out."""
    return Text("".join(char for char in " ".join(text.split()) if char.isprintable()))
