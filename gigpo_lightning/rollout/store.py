"""Trajectories on disk: one Arrow stream file per iteration, one row per segment, read back memory-mapped.

The file opens with `pyarrow.ipc.open_stream` and with `datasets.Dataset.from_file`. It is written in batches of whole
groups and appears under its name only when complete. Knows nothing about policies or estimators.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa

from gigpo_lightning.batch import MicroBatch, PackRow, pack
from gigpo_lightning.credit import Credit
from gigpo_lightning.trajectory import Episode, Group, Segment

_TURN_FIELDS = (
    ("observation", pa.string()),
    ("action", pa.string()),
    ("reward", pa.float64()),
    ("anchor", pa.string()),
    ("valid", pa.bool_()),
    ("admissible", pa.bool_()),
    ("tokens", pa.int32()),
    ("well_formed", pa.bool_()),
    ("step_return", pa.float64()),
    ("step_group", pa.int64()),
    ("episode_advantage", pa.float64()),
    ("step_advantage", pa.float64()),
    ("advantage", pa.float64()),
    ("value", pa.float64()),
    ("value_target", pa.float64()),
)
SCHEMA = pa.schema(
    [
        ("group", pa.int64()),
        ("episode", pa.int64()),
        ("segment", pa.int32()),
        ("task_id", pa.string()),
        ("stage", pa.string()),
        ("instruction", pa.string()),
        ("end", pa.string()),
        ("won", pa.bool_()),
        ("first_turn", pa.int32()),
        ("token_ids", pa.list_(pa.int32())),
        ("response_mask", pa.list_(pa.bool_())),
        ("turn_index", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("allowed_ids", pa.list_(pa.int32())),
        ("allowed_counts", pa.list_(pa.int32())),
        ("answer_starts", pa.list_(pa.int32())),
        *[(name, pa.list_(kind)) for name, kind in _TURN_FIELDS],
    ]
)


def turns_of(segment: Segment) -> range:
    """The turns of the episode that were played in this segment."""
    played = [t for t in segment.turn_index if t >= 0]
    return range(min(played), max(played) + 1) if played else range(0)


class RolloutWriter:
    """Writes groups with their credit; a context manager. Without a clean exit no file appears.

    Raises:
        OSError: The folder cannot be written or the disk is full; nothing is left behind.
    """

    def __init__(self, path: Path):
        self.path = path
        self._partial = path.with_suffix(".partial")

    def __enter__(self) -> RolloutWriter:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._sink = pa.OSFile(str(self._partial), "wb")
        self._writer = pa.ipc.new_stream(self._sink, SCHEMA)
        self._groups = self._episodes = 0
        return self

    def write(self, groups: Sequence[Group], stages: Sequence[str], credit: Credit) -> None:
        """Append groups; `credit` holds their turns in order (groups, then episodes, then turns)."""
        rows: list[dict[str, object]] = []
        offset = 0
        for group, stage in zip(groups, stages, strict=True):
            for episode in group.episodes:
                rows += self._rows(episode, stage, credit, offset)
                offset += len(episode.turns)
                self._episodes += 1
            self._groups += 1
        self._writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))

    def _rows(self, episode: Episode, stage: str, credit: Credit, offset: int) -> list[dict[str, object]]:
        rows = []
        for number, segment in enumerate(episode.segments):
            span = turns_of(segment)
            turns = episode.turns[span.start : span.stop]
            flat = slice(offset + span.start, offset + span.stop)
            row: dict[str, object] = {
                "group": self._groups,
                "episode": self._episodes,
                "segment": number,
                "task_id": episode.task_id,
                "stage": stage,
                "instruction": episode.instruction,
                "end": episode.end.value,
                "won": episode.won,
                "first_turn": span.start,
                **{name: getattr(segment, name) for name in Segment.__slots__},
                "observation": [t.observation for t in turns],
                "action": [t.action for t in turns],
                "reward": [t.reward for t in turns],
                "anchor": [str(t.anchor) for t in turns],
                "valid": [t.valid for t in turns],
                "admissible": [t.admissible for t in turns],
                "tokens": [t.tokens for t in turns],
                "well_formed": [t.well_formed for t in turns],
                "step_group": credit.step_group_ids[flat].tolist(),
            }
            for name in ("step_return", "episode_advantage", "step_advantage", "advantage", "value", "value_target"):
                of_turns = getattr(credit, name)
                row[name] = None if of_turns is None else of_turns[flat].tolist()
            rows.append(row)
        return rows

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()
        self._sink.close()
        if kind is None:
            self._partial.replace(self.path)
        else:
            self._partial.unlink(missing_ok=True)


class RolloutStore:
    """A written file, memory-mapped: rows are read when a minibatch needs them.

    Attributes:
        token_counts: int64 [rows], tokens of each row.
        chosen_counts: float64 [rows], tokens that the policy chose.
        teaches: bool [rows], whether any turn of the row has an advantage other than 0.
        valued: bool [rows], whether a critic has values of its turns to learn.
    """

    def __init__(self, path: Path):
        with pa.memory_map(str(path)) as source:
            table = pa.ipc.open_stream(source).read_all()
        self.table = table.combine_chunks() if table.num_rows else table
        self.token_counts = _lengths(self._list("token_ids"))
        self.chosen_counts = self._row_sums("response_mask")
        self.teaches = self._row_sums("advantage") > 0
        self.valued = _lengths(self._list("value_target")) > 0
        self._mean, self._scale = 0.0, 1.0

    def normalise(self, mean: float, scale: float) -> None:
        """Let all micro-batches have (advantage − mean) · scale."""
        self._mean, self._scale = mean, scale

    def moments(self) -> tuple[float, float, float]:
        """Number, mean and sum of squared deviations of the advantages of all turns in which something was chosen."""
        tokens, advantages = (self._list(name).flatten().to_numpy() for name in ("tokens", "advantage"))
        chosen = advantages[tokens > 0]
        mean = float(chosen.mean()) if len(chosen) else 0.0
        return float(len(chosen)), mean, float(((chosen - mean) ** 2).sum())

    def _row_sums(self, name: str) -> np.ndarray:
        """The sum of absolute values of a list column, for every row."""
        array = self._list(name)
        values = np.abs(array.flatten().to_numpy(zero_copy_only=False).astype(np.float64))
        return np.diff(np.concatenate([[0.0], np.cumsum(values)])[array.offsets.to_numpy()])

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def _list(self, name: str) -> pa.ListArray:
        column = self.table.column(name)
        return column.chunk(0) if column.num_chunks else pa.array([], column.type)

    def _row(self, name: str, row: int) -> np.ndarray:
        array = self._list(name)
        begin, end = array.offsets[row].as_py(), array.offsets[row + 1].as_py()
        return np.asarray(array.values.slice(begin, end - begin).to_numpy(zero_copy_only=False))

    def micro_batch(self, rows: Sequence[int]) -> MicroBatch:
        """The given segments as one packed micro-batch."""
        first_turns = self.table.column("first_turn")
        return pack(
            [
                PackRow(
                    token_ids=self._row("token_ids", row),
                    response_mask=self._row("response_mask", row),
                    turn_index=self._row("turn_index", row) - first_turns[row].as_py(),
                    logprobs=self._row("logprobs", row),
                    allowed_ids=self._row("allowed_ids", row),
                    allowed_counts=self._row("allowed_counts", row),
                    advantages=(self._row("advantage", row) - self._mean) * self._scale,
                    answer_starts=self._row("answer_starts", row),
                    values=self._row("value", row) if self.valued[row] else None,
                    value_targets=self._row("value_target", row) if self.valued[row] else None,
                )
                for row in rows
            ]
        )


def _lengths(array: pa.ListArray) -> np.ndarray:
    return np.diff(array.offsets.to_numpy())
