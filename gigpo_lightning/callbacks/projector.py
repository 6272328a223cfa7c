"""The anchor library in TensorBoard's embedding projector: one point per state, placed by what the policy makes of it.

Knows the table and the policy's embedding of texts, not when it is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.loggers import TensorBoardLogger

from gigpo_lightning.callbacks.anchor_table import AnchorTable
from gigpo_lightning.placement import acting
from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.policy.embedding import observation_embeddings

HEADER = ["text", "visits", "mean return", "stage"]
TAG = "anchors"
# Tokens of one run of the model.
MAX_TOKENS = 4096
CONFIG = "projector_config.pbtxt"
_ENTRY = "embeddings {"


def project(trainer: pl.Trainer, policy: BasePolicy, table: AnchorTable, anchors: int, iteration: int) -> None:
    """Embed the most visited states and add them, as the points of `iteration`. All processes must call it.

    Args:
        trainer: Its TensorBoard loggers get the points.
        policy: Embeds the states' texts with its present weights.
        table: The library.
        anchors: The most states to show.
        iteration: What the points are filed under.
    """
    rows = most_visited(table, anchors)
    if not len(rows):
        return
    with acting(policy, trainer.precision_plugin) as whole:
        vectors = observation_embeddings(whole, [table.texts[row] for row in rows], MAX_TOKENS)
    if not trainer.is_global_zero:
        return
    boards = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
    if not boards:
        rank_zero_warn("AnchorLibrary.projector_every has no TensorBoardLogger in trainer.logger: nothing is written")
    for board in boards:
        _add(board.experiment, Path(board.log_dir), vectors, metadata(table, rows), iteration)


def most_visited(table: AnchorTable, anchors: int) -> np.ndarray:
    """The rows of the most visited states that have a text, most first; of equally many the older first."""
    rows = np.array([row for row, text in enumerate(table.texts) if text.strip() and table.visits[row]], np.int64)
    return rows[np.argsort(-table.visits[rows], kind="stable")[:anchors]]


def metadata(table: AnchorTable, rows: np.ndarray) -> list[list[str]]:
    """One line of `HEADER` per row; what would end a field or a line is a blank."""
    return [
        [
            " ".join(table.texts[row].split()),
            str(int(table.visits[row])),
            f"{table.mean[row]:.4f}",
            " ".join(table.stages[row].split()),
        ]
        for row in rows
    ]


def _add(writer: Any, folder: Path, vectors: torch.Tensor, lines: list[list[str]], iteration: int) -> None:
    """Add the points, and keep those that an earlier part of the run has added: the writer knows only its own."""
    path = folder / CONFIG
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    writer.add_embedding(vectors, metadata=lines, metadata_header=HEADER, global_step=iteration, tag=TAG)
    # The file is a list of blocks; one that is written anew is the same to the letter.
    entries = [entry for text in (before, path.read_text(encoding="utf-8")) for entry in text.split(_ENTRY)[1:]]
    path.write_text("".join(_ENTRY + entry for entry in dict.fromkeys(entries)), encoding="utf-8")
