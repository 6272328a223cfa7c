"""Statistics of anchor states by key: how often seen, when, and the running mean and variance of the step return.

One idea, the merge of two tables (Chan, Golub and LeVeque 1979), serves an iteration, other processes and a saved file.
Knows nothing about training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from gigpo_lightning.files import replacing
from gigpo_lightning.rollout.library_baseline import KnownReturns

_INTEGERS = ("visits", "first_seen", "last_seen")
_FLOATS = ("mean", "m2")
_TEXTS = ("keys", "texts", "stages")
_FORMAT = b"gigpo_lightning anchors 2"
FILE = "anchors.arrow"  # in a run's folder, where no other place is given
SCOPES = ("task", "world", "text")
_SCOPES = tuple(scope.encode() for scope in SCOPES)
_SCHEMA = pa.schema(
    [(name, pa.string()) for name in _TEXTS]
    + [(name, pa.int64()) for name in _INTEGERS]
    + [(name, pa.float64()) for name in _FLOATS],
    metadata={"format": _FORMAT},
)


def keys_of(scope: str, task_ids: Sequence[str], anchors: Sequence[str], texts: Sequence[str]) -> Sequence[str]:
    """The keys of turns, given by task, anchor key and observation; what they are is `AnchorTable.scope`'s to say."""
    if scope == "world":
        return anchors
    if scope == "text":
        return [hashlib.blake2b(text.encode(), digest_size=12).hexdigest() for text in texts]
    return [f"{task}|{anchor}" for task, anchor in zip(task_ids, anchors, strict=True)]


class AnchorTable:
    """Anchor states in order of first sight, one row each.

    `scope` says what a key is: `task` for `<task id>|<anchor>`, `world` for the anchor alone, `text` for a digest of
    the observation. `visits` int64, `mean` and `m2` (the sum of squared deviations) float64 of the step return,
    `first_seen` and `last_seen` int64 iterations; `texts` and `stages` are those of the first sight.
    """

    def __init__(self, scope: str = "task") -> None:
        self.scope = scope
        self.keys: list[str] = []
        self.texts: list[str] = []
        self.stages: list[str] = []
        self.visits: np.ndarray = np.zeros(0, np.int64)
        self.first_seen: np.ndarray = np.zeros(0, np.int64)
        self.last_seen: np.ndarray = np.zeros(0, np.int64)
        self.mean: np.ndarray = np.zeros(0)
        self.m2: np.ndarray = np.zeros(0)
        self._row: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, key: str) -> bool:
        return key in self._row

    @classmethod
    def of_turns(
        cls,
        keys: Sequence[str],
        step_returns: Sequence[float] | np.ndarray,
        texts: Sequence[str],
        stages: Sequence[str],
        iteration: int,
        text_chars: int,
    ) -> AnchorTable:
        """The table of one iteration's turns, all arguments of one length; texts are cut to `text_chars` characters.

        Raises:
            ValueError: Lengths differ, or a return is not finite.
        """
        returns = np.asarray(step_returns, np.float64)
        if not len(keys) == len(returns) == len(texts) == len(stages):
            lengths = f"keys {len(keys)}, returns {len(returns)}, texts {len(texts)}, stages {len(stages)}"
            raise ValueError(f"every turn needs one entry in each: {lengths}")
        if not np.isfinite(returns).all():
            raise ValueError("a step return is not finite")
        table = cls()
        row = table._row
        rows = np.fromiter((row.setdefault(key, len(row)) for key in keys), np.int64, len(keys))
        first = np.unique(rows, return_index=True)[1]
        table.keys = list(row)
        table.texts = [texts[turn][:text_chars] for turn in first]
        table.stages = [stages[turn] for turn in first]
        table.visits = np.bincount(rows, minlength=len(row)).astype(np.int64)
        table.mean = np.bincount(rows, returns, len(row)) / np.maximum(table.visits, 1)
        table.m2 = np.bincount(rows, (returns - table.mean[rows]) ** 2, len(row))
        table.first_seen = np.full(len(row), iteration, np.int64)
        table.last_seen = table.first_seen.copy()
        return table

    def variance(self) -> np.ndarray:
        """Sample variance of the step return, [anchors]; 0 with fewer than two visits."""
        return np.where(self.visits > 1, self.m2 / np.maximum(self.visits - 1, 1), 0.0)

    def look_up(self, keys: Sequence[str]) -> KnownReturns:
        """Visits, mean and sample variance of these states, [keys] each; zeros for unknown ones."""
        rows = np.fromiter((self._row.get(key, -1) for key in keys), np.int64, len(keys))
        known = rows >= 0
        found = KnownReturns(np.zeros(len(rows), np.int64), np.zeros(len(rows)), np.zeros(len(rows)))
        at = rows[known]
        for column, values in zip(found, (self.visits, self.mean, self.variance()), strict=True):
            column[known] = values[at]
        return found

    def merge(self, other: AnchorTable) -> None:
        """Add the visits of `other`.

        With n = n_a + n_b and δ = μ_b − μ_a: μ = μ_a + δ·n_b/n and M2 = M2_a + M2_b + δ²·n_a·n_b/n.
        """
        if not len(other):
            return
        self._append_new(other)
        rows = np.fromiter((self._row[key] for key in other.keys), np.int64, len(other))
        n_a, n_b = self.visits[rows], other.visits
        n = np.maximum(n_a + n_b, 1)
        delta = other.mean - self.mean[rows]
        self.mean[rows] += delta * n_b / n
        self.m2[rows] += other.m2 + delta**2 * n_a * n_b / n
        self.visits[rows] += n_b
        self.first_seen[rows] = np.minimum(self.first_seen[rows], other.first_seen)
        self.last_seen[rows] = np.maximum(self.last_seen[rows], other.last_seen)

    def _append_new(self, other: AnchorTable) -> None:
        """Rows without visits for the keys of `other` that are not here yet."""
        new = [row for row, key in enumerate(other.keys) if key not in self._row]
        for row in new:
            self._row[other.keys[row]] = len(self.keys)
            self.keys.append(other.keys[row])
            self.texts.append(other.texts[row])
            self.stages.append(other.stages[row])
        self.first_seen = np.concatenate([self.first_seen, other.first_seen[new]])
        self.last_seen = np.concatenate([self.last_seen, other.last_seen[new]])
        self.visits = np.concatenate([self.visits, np.zeros(len(new), np.int64)])
        self.mean = np.concatenate([self.mean, np.zeros(len(new))])
        self.m2 = np.concatenate([self.m2, np.zeros(len(new))])

    def shrink(self, size: int) -> None:
        """Keep `size` anchors: those seen last, of these the most visited, of these the oldest."""
        if len(self) <= size:
            return
        order = np.lexsort((np.arange(len(self)), -self.visits, -self.last_seen))
        keep = np.sort(order[:size])
        for name in _TEXTS:
            column = getattr(self, name)
            setattr(self, name, [column[row] for row in keep])
        for name in (*_INTEGERS, *_FLOATS):
            setattr(self, name, getattr(self, name)[keep])
        self._row = {key: row for row, key in enumerate(self.keys)}

    def forget_statistics(self) -> None:
        """Start visits, mean and variance anew; the states stay known."""
        self.visits[:] = 0
        self.mean[:] = 0.0
        self.m2[:] = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Tensors and one long text per column: torch pickles thousands of small texts slowly."""
        state: dict[str, Any] = {"scope": self.scope}
        state |= {name: torch.from_numpy(getattr(self, name).copy()) for name in (*_INTEGERS, *_FLOATS)}
        for name in _TEXTS:
            column = getattr(self, name)
            state[name] = "".join(column)
            state[f"{name}_chars"] = torch.tensor([len(text) for text in column], dtype=torch.int64)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the rows of a saved table in place of these."""
        self.scope = state["scope"]
        for name in _TEXTS:
            ends = state[f"{name}_chars"].cumsum(0).tolist()
            setattr(self, name, [state[name][begin:end] for begin, end in zip([0, *ends], ends, strict=False)])
        for name in (*_INTEGERS, *_FLOATS):
            setattr(self, name, state[name].numpy().copy())
        self._row = {key: row for row, key in enumerate(self.keys)}

    def save(self, path: Path) -> None:
        """Write an Arrow file, readable with pyarrow or pandas; whole or not at all."""
        schema = _SCHEMA.with_metadata({**_SCHEMA.metadata, b"scope": self.scope.encode()})
        table = pa.table({name: pa.array(getattr(self, name)) for name in schema.names}, schema=schema)
        with (
            replacing(path) as partial,
            pa.OSFile(str(partial), "wb") as sink,
            pa.ipc.new_file(sink, table.schema) as writer,
        ):
            writer.write_table(table)

    @classmethod
    def load(cls, path: Path) -> AnchorTable:
        """Read a file that `save` wrote.

        Raises:
            ValueError: The file is missing, damaged or of another kind.
        """
        try:
            with pa.memory_map(str(path)) as source:
                arrow = pa.ipc.open_file(source).read_all()
            arrow.validate(full=True)  # else a wrong offset in a damaged file crashes the interpreter when it is used
        except (OSError, KeyError, UnicodeDecodeError, pa.ArrowException) as error:
            raise ValueError(f"anchor library {path}: cannot be read: {error}") from error
        metadata = arrow.schema.metadata or {}
        if (
            not arrow.schema.equals(_SCHEMA)
            or metadata.get(b"format") != _FORMAT
            or metadata.get(b"scope") not in _SCOPES
        ):
            raise ValueError(f"anchor library {path}: not an anchor library of this version of gigpo_lightning")
        table = cls(metadata[b"scope"].decode())
        for name in _TEXTS:
            setattr(table, name, arrow[name].to_pylist())
        for name in (*_INTEGERS, *_FLOATS):
            setattr(table, name, arrow[name].to_numpy().copy())
        table._row = {key: row for row, key in enumerate(table.keys)}
        missing = any(column.null_count for column in arrow.columns)
        possible = np.isfinite([table.mean, table.m2]).all() and (table.m2 >= 0).all() and (table.visits >= 0).all()
        if missing or len(table._row) < len(table) or not possible:
            raise ValueError(f"anchor library {path}: damaged: it holds a state twice, or a figure that none can have")
        return table
