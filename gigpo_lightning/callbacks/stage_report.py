"""What became of the stages of a curriculum: a row for each stay in one, for the eye and as plain values.

Knows the records of a stay, not how the curriculum moves.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from gigpo_lightning.curriculum import Stage, pooled

COLUMNS = ("stage", "iterations", "env steps", "at entry", "at exit")
_UNFOLDED = 1000  # columns where no terminal limits them


def visit(
    stage: Stage, history: Sequence[Sequence[float]], end: int, env_steps: int, moved: str | None, why: str
) -> dict[str, Any]:
    """The record of one stay in a stage.

    Args:
        stage: The stage.
        history: `(won, episodes)` of each iteration of the stay.
        end: The number of iterations that the run had played when the stay ended.
        env_steps: Steps in the environment during the stay, those of rehearsal, too.
        moved: `promoted`, `demoted`, `passed` (the last stage), or None where the run ended in it.
        why: What the rule said.

    Returns:
        Plain values: `success_entry` is the rate of the first iteration with an episode of the stage, `success_exit`
        the moving average at the end, on which the rule decides; None without an episode.
    """
    played = [entry for entry in history if entry[1]]
    return {
        "stage": stage.name,
        "first_iteration": end - len(history),
        "iterations": len(history),
        "env_steps": env_steps,
        "success_entry": pooled(played[:1]),
        "success_exit": pooled(history[-stage.window :]),
        "moved": moved,
        "why": why,
    }


def stage_table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of `visit` as a table, for the width of the terminal: in a narrow one only the last column is folded."""
    table = Table(title="Stages of the curriculum, success at entry and at exit")
    for name in COLUMNS:
        table.add_column(name, no_wrap=True)
    table.add_column("left", overflow="fold")
    for row in rows:
        rates = [f"{row[key]:.3f}" if row[key] is not None else "–" for key in ("success_entry", "success_exit")]
        counts = [str(row["iterations"]), f"{row['env_steps']:,}"]
        table.add_row(row["stage"], *counts, *rates, f"{row['moved'] or 'the run ended'}: {row['why']}")
    console = Console(width=None if sys.stdout.isatty() else _UNFOLDED)
    with console.capture() as text:
        console.print(table)
    return text.get().rstrip("\n")
