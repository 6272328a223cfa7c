"""Flat step records as arrays: read and check them, number their ids, walk through them in chunks of whole groups.

Everything is linear in the number of records. Knows nothing of what is computed from them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import count, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Records of one chunk, 256 KB an array: the temporaries stay in the processor's cache and are reused, which
# keeps ten million records at ten times the cost of one million.
CHUNK_RECORDS = 1 << 15

# Scores of a group whose standard deviation is below this share of the summed |rewards| behind them are equal up to
# round-off. float32 rewards carry 6e-8 each (factor 16 of slack); float64 sums of 1e5 terms stay below 1e-11.
_ROUND_OFF_FLOAT32 = 1e-6
ROUND_OFF_FLOAT64 = 1e-9


def read_values(name: str, values: ArrayLike | Tensor, n_records: int | None = None) -> Floats:
    """One finite float64 per record.

    Raises:
        ValueError: A missing (NaN, None) or infinite value, or a wrong shape.
    """
    array = as_array(values)
    if array.dtype.kind not in "fiub" and array.size:
        raise ValueError(f"{name}: {array.dtype} values; expected numbers (a missing one is an error, not 0)")
    if array.ndim != 1 or (n_records is not None and len(array) != n_records):
        wanted = "S" if n_records is None else n_records
        raise ValueError(f"{name}: shape {array.shape}; expected one value per record, [{wanted}]")
    array = np.require(array, np.float64, ["ALIGNED"])  # a field of packed records may not be
    if array.size and not (np.isfinite(array.min()) and np.isfinite(array.max())):  # both pass a NaN on
        bad = int(np.argmin(np.isfinite(array)))
        raise ValueError(f"{name}: {array[bad]} at record {bad}; a missing or infinite value is an error, not 0")
    return array


def read_integers(name: str, values: ArrayLike | Tensor, n_records: int) -> Ints:
    """One int64 per record.

    Raises:
        ValueError: Values that are no integers, or a wrong shape.
    """
    array = as_array(values)
    if array.shape != (n_records,):
        raise ValueError(f"{name}: shape {array.shape}; expected one per record, [{n_records}]")
    if array.dtype.kind not in "iu" and array.size:
        raise ValueError(f"{name}: {array.dtype} values; expected integers")
    return array.astype(np.int64, copy=False)


def compact(ids: Ints) -> Ints:
    """The ids as numbers ≥ 0 of about the size of the batch, so that sums per id are direct look-ups."""
    if len(ids) == 0:
        return ids
    if (offsets := _dense_offsets(ids)) is not None:
        return offsets
    numbers: defaultdict[int, int] = defaultdict(count().__next__)
    return np.fromiter(map(numbers.__getitem__, ids.tolist()), dtype=np.int64, count=len(ids))


def sorting_order(ids: Ints) -> Ints | None:
    """The permutation that sorts the ids and keeps the order of equal ones; None if they are sorted.

    One pass per 16 bits of the ids' span: numpy sorts 16-bit integers by counting, so the cost is linear.
    """
    if bool((ids[1:] >= ids[:-1]).all()):
        return None
    low = int(ids.min())
    offsets = (ids - low if low else ids).view(np.uint64)
    order = np.argsort(offsets.astype(np.uint16), kind="stable")
    for shift in range(16, int(offsets.max()).bit_length(), 16):
        digit = (offsets >> np.uint64(shift)).astype(np.uint16)
        order = order[np.argsort(digit[order], kind="stable")]
    return order


def run_bounds(sorted_ids: Ints) -> Ints:
    """Where runs of equal ids begin, and at last the length: [0, …, S]."""
    starts = np.flatnonzero(sorted_ids[1:] != sorted_ids[:-1]) + 1
    return np.concatenate([[0], starts, [len(sorted_ids)]])


def in_chunks(
    owner_ids: Ints, inputs: Sequence[NDArray[Any]], compute: Callable[..., Sequence[Floats]], n_outputs: int
) -> list[Floats]:
    """`compute` on chunks of records that never cut an owner (a task group, an episode), in any order of the input.

    Args:
        owner_ids: Owner of each record, compact [S].
        inputs: Arrays of int64 or float64 [S].
        compute: Gets the slices of the owners and of the inputs; gives `n_outputs` float arrays of the same length.
        n_outputs: Number of results.

    Returns:
        The results of all chunks, each [S], in the order of the input.
    """
    n_records = len(owner_ids)
    columns = [owner_ids, *inputs]
    order = sorting_order(owner_ids)
    rows = None if order is None else _as_rows(columns)
    lengths = np.bincount(owner_ids)
    edges = np.concatenate([[0], np.cumsum(lengths[lengths > 0])])
    cuts = np.searchsorted(edges, np.arange(0, n_records, CHUNK_RECORDS))
    outputs = [np.empty(n_records) for _ in range(n_outputs)]
    for lo, hi in pairwise(np.unique([*edges[cuts], n_records]).tolist()):
        chunk: Any = slice(lo, hi) if order is None else order[lo:hi]
        slices = [values[chunk] for values in columns] if rows is None else _as_columns(rows.take(chunk), columns)
        for output, values in zip(outputs, compute(*slices), strict=True):
            output[chunk] = values
    return outputs


class Layout(NamedTuple):
    """Where records belong.

    `slot` [S]: place of each record once sorted by (episode, step), None if they are sorted; `last` [S]: in that order,
    True at the end of an episode.
    """

    episodes: Ints
    steps: Ints
    slot: Ints | None
    last: NDArray[np.bool_]


def lay_out(episodes: Ints, steps: Ints) -> Layout:
    """Where every record belongs, from compact episode ids. As the steps of an episode are 0 … n−1, it needs no sort.

    Raises:
        ValueError: An episode lacks a step or has one twice.
    """
    n_records = len(episodes)
    lengths = np.bincount(episodes)
    if ((steps < 0) | (steps >= lengths[episodes])).any():
        raise ValueError("step_index: an episode's steps must be 0, 1, … without a gap; a step is missing or negative")
    start = np.cumsum(lengths) - lengths
    slot = start[episodes] + steps
    if (np.bincount(slot, minlength=n_records) != 1).any():
        raise ValueError("step_index: two records have the same episode and step; credit each step once")
    last = np.zeros(n_records, dtype=np.bool_)
    last[(start + lengths - 1)[lengths > 0]] = True
    is_sorted = bool((slot == np.arange(n_records)).all())
    return Layout(episodes, steps, None if is_sorted else slot, last)


def discounted(reward_t: Floats, layout: Layout, gamma: float) -> Floats:
    """R_t = r_t + γ R_{t+1}, one pass from the end.

    A plain loop: its cost per record does not depend on the lengths of the episodes, and every episode's sum is made
    in the same order wherever it lies in the batch, so that equal episodes have equal returns to the last bit.
    """
    values = reward_t
    if layout.slot is not None:
        values = np.empty_like(reward_t)
        values[layout.slot] = reward_t
    # memoryviews give one number after the other: lists of them would claim fresh memory for every chunk
    pairs = zip(values[::-1].data, layout.last[::-1].data, strict=True)
    follow = 0.0
    backwards = (follow := reward if is_last else reward + gamma * follow for reward, is_last in pairs)
    returns = np.fromiter(backwards, dtype=np.float64, count=len(values))[::-1]
    return returns if layout.slot is None else returns[layout.slot]


def round_off(values: ArrayLike | Tensor) -> float:
    """The share of its size below which a difference of sums of such values is none."""
    dtype = values.dtype if isinstance(values, (np.ndarray, Tensor)) else np.float64
    small = (torch.float32, torch.float16, torch.bfloat16, np.dtype(np.float32), np.dtype(np.float16))
    return _ROUND_OFF_FLOAT32 if dtype in small else ROUND_OFF_FLOAT64


class OwnedOnce:
    """Numbers ids, chunk of whole owners after chunk, and checks that every id occurs with one owner only."""

    def __init__(self, name: str, ids: Ints) -> None:
        """`ids`: all of them, compact; `name`: what they stand for, for the message."""
        n_ids = int(ids.max(initial=-1)) + 1
        self._name = name
        self._is_taken = np.zeros(n_ids, dtype=np.bool_)
        self._place = np.empty(n_ids, dtype=np.int64)

    def number(self, ids: Ints, owners: Ints) -> Ints:
        """The ids as numbers >= 0 of about the size of the chunk.

        Raises:
            ValueError: An id has two owners among these, or had another in an earlier chunk.
        """
        numbers = self._numbers(ids)
        owner = np.empty(int(numbers.max(initial=-1)) + 1, dtype=np.int64)
        owner[numbers] = owners
        if (owner[numbers] != owners).any() or self._is_taken[ids].any():
            raise ValueError(f"group_ids: one {self._name} lies in two task groups; build it inside one task group")
        self._is_taken[ids] = True
        return numbers

    def _numbers(self, ids: Ints) -> Ints:
        if (offsets := _dense_offsets(ids)) is not None:
            return offsets
        position = np.arange(len(ids))
        self._place[ids] = position
        same = self._place[ids]  # one position for all records of the same id
        return (np.cumsum(same == position) - 1)[same]


def check_unit(name: str, value: float) -> None:
    """Raises `ValueError` unless the value is in [0, 1]."""
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name}: {value} is outside [0, 1]")


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raises `ValueError` unless the value is one of the allowed."""
    if value not in allowed:
        raise ValueError(f"{name}: {value!r} is unknown; choose one of {', '.join(allowed)}")


def as_array(values: ArrayLike | Tensor) -> NDArray[Any]:
    """The values in numpy, where possible without a copy."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return np.asarray(values)


def _dense_offsets(ids: Ints) -> Ints | None:
    """The ids less the smallest, or None where they lie too far apart to be indices."""
    low, high = int(ids.min()), int(ids.max())
    if high - low > 2 * len(ids) + 1024:
        return None
    return ids - low if low else ids


def _as_rows(columns: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """The columns side by side, so that a record out of order is one access to memory and not one per column."""
    fields = [(str(i), _narrow_type(values)) for i, values in enumerate(columns)]
    rows = np.empty(len(columns[0]), dtype=fields)
    for lo in range(0, len(rows), CHUNK_RECORDS):  # a chunk stays in the cache until all its columns are there
        for i, values in enumerate(columns):
            rows[str(i)][lo : lo + CHUNK_RECORDS] = values[lo : lo + CHUNK_RECORDS]
    return rows


def _narrow_type(values: NDArray[Any]) -> np.dtype[Any]:
    """Half the memory where it holds every value: what is touched for the first time is dear."""
    fits = values.dtype.kind == "i" and values.min() >= 0 and values.max() < 1 << 32
    return np.dtype(np.uint32) if fits else values.dtype


def _as_columns(rows: NDArray[Any], columns: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """The columns of some rows, each in its own type."""
    return [rows[str(i)].astype(values.dtype) for i, values in enumerate(columns)]
