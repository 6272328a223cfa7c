"""Trajectories on disk: one Arrow stream file per iteration, one row per segment, read back memory-mapped.

The file opens with `pyarrow.ipc.open_stream` and with `datasets.Dataset.from_file`. It is written in batches of whole
groups and appears under its name only when complete. Knows nothing about policies or estimators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gigpo_lightning.batch import MicroBatch, PackRow, pack
from gigpo_lightning.credit import Credit
from gigpo_lightning.files import replacing
from gigpo_lightning.rollout.report import CreditTable
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
        ("age", pa.int32()),
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

    def __enter__(self) -> RolloutWriter:
        with ExitStack() as files:
            partial = files.enter_context(replacing(self.path))
            sink = files.enter_context(pa.OSFile(str(partial), "wb"))
            self._writer = files.enter_context(pa.ipc.new_stream(sink, SCHEMA))
            self._files = files.pop_all()
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
                "age": episode.age,
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
        self._files.__exit__(kind, error, trace)


class RolloutStore:
    """A written file, memory-mapped: rows are read when a minibatch needs them.

    Nothing but these figures of every row is copied: pages of the file come and go as the system sees fit.

    Attributes:
        token_counts: int64 [rows], tokens of each row.
        chosen_counts: float64 [rows], tokens that the policy chose.
        teaches: bool [rows], whether any turn of the row has an advantage other than 0.
        ages: int32 [rows], how many iterations ago each row was sampled.
        valued: bool [rows], whether a critic has values of its turns to learn.
    """

    def __init__(self, path: Path):
        with pa.memory_map(str(path)) as source:
            self.table = pa.ipc.open_stream(source).read_all()
        self._parts = self.table.to_batches()
        self._starts = np.cumsum([0, *(len(part) for part in self._parts)])
        self.token_counts = self._of_rows("token_ids", _lengths)
        self.chosen_counts = self._of_rows("response_mask", _row_sums)
        self.teaches = self._of_rows("advantage", _row_sums) > 0
        self.ages = self._of_rows("age", np.asarray)
        self.valued = self._of_rows("value_target", _lengths) > 0
        self._mean, self._scale = 0.0, 1.0

    def normalise(self, mean: float, scale: float) -> None:
        """Let all micro-batches have (advantage − mean) · scale."""
        self._mean, self._scale = mean, scale

    def moments(self) -> tuple[float, float, float]:
        """Number, mean and sum of squared deviations of the advantages of all turns in which something was chosen."""
        own = [_moments(part) for part in self._parts]
        return merged_moments(own)

    def _of_rows(self, name: str, measure: Callable[[pa.Array], np.ndarray]) -> np.ndarray:
        """A figure of every row from a column, part by part."""
        return np.concatenate([np.zeros(0, np.int64), *(measure(part.column(name)) for part in self._parts)])

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def _pack_row(self, row: int) -> PackRow:
        """The arrays of a row, views of the file where that is possible."""
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        part, place = self._parts[number], row - int(self._starts[number])

        def read(name: str) -> np.ndarray:
            array = part.column(name)
            begin, end = array.offsets[place].as_py(), array.offsets[place + 1].as_py()
            return np.asarray(array.values.slice(begin, end - begin).to_numpy(zero_copy_only=False))

        return PackRow(
            token_ids=read("token_ids"),
            response_mask=read("response_mask"),
            turn_index=read("turn_index") - part.column("first_turn")[place].as_py(),
            logprobs=read("logprobs"),
            allowed_ids=read("allowed_ids"),
            allowed_counts=read("allowed_counts"),
            advantages=(read("advantage") - self._mean) * self._scale,
            answer_starts=read("answer_starts"),
            values=read("value") if self.valued[row] else None,
            value_targets=read("value_target") if self.valued[row] else None,
        )

    def micro_batch(self, rows: Sequence[int]) -> MicroBatch:
        """The given segments as one packed micro-batch."""
        return pack([self._pack_row(row) for row in rows])

    def credit_tables(self) -> Iterator[CreditTable]:
        """The turns that were played in this iteration, as many at a time as were written at a time."""
        for written in self._parts:
            part = written.filter(pc.equal(written.column("age"), 0))
            turns = _lengths(part.column("anchor"))
            tasks, stages = (np.repeat(part.column(name).to_pylist(), turns).tolist() for name in ("task_id", "stage"))
            yield CreditTable(
                step_returns=part.column("step_return").flatten().to_numpy(),
                tasks=tasks,
                anchors=part.column("anchor").flatten().to_pylist(),
                texts=part.column("observation").flatten().to_pylist(),
                stages=stages,
            )


def merged_moments(parts: Iterable[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Number, mean and sum of squared deviations of all values, from those of their parts."""
    n, mean, squares = 0.0, 0.0, 0.0
    for count, own_mean, own_squares in parts:
        difference, total = own_mean - mean, max(n + count, 1.0)
        squares += own_squares + difference**2 * n * count / total
        mean, n = mean + difference * count / total, n + count
    return n, mean, squares


def _moments(part: pa.RecordBatch) -> tuple[float, float, float]:
    tokens, advantages = (part.column(name).flatten().to_numpy() for name in ("tokens", "advantage"))
    chosen = advantages[tokens > 0]
    mean = float(chosen.mean()) if len(chosen) else 0.0
    return float(len(chosen)), mean, float(((chosen - mean) ** 2).sum())


def _lengths(array: pa.ListArray) -> np.ndarray:
    return np.diff(array.offsets.to_numpy())


def _row_sums(array: pa.ListArray) -> np.ndarray:
    """The sum of absolute values of every list."""
    values = np.abs(array.flatten().to_numpy(zero_copy_only=False).astype(np.float64))
    return np.diff(np.concatenate([[0.0], np.cumsum(values)])[array.offsets.to_numpy()])
