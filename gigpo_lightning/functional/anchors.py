"""Which steps left the same state: step groups from anchor keys or from texts.

Groups are always formed inside one task group: equal keys of different tasks are never merged. Nothing here knows about
rewards, episodes or tokens. Step groups are numbered 0, 1, … in the order in which they first appear in the batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import count, pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from .records import CHUNK_RECORDS, Ints, as_array, check_choice, check_unit, read_integers, run_bounds, sorting_order

SIMILARITY_METHODS = ("leader", "reference")

# A dictionary that names its members 0, 1, … as they are first asked for.
_Numbering = Callable[[Iterable[Hashable], Iterator[int]], Iterable[int]]


def group_exact(keys: Sequence[Hashable] | NDArray[Any] | Tensor, group_ids: ArrayLike | Tensor) -> Tensor:
    """Steps of one task group with equal keys form a step group.

    Args:
        keys: Anchor key of every step, [S]; any hashables.
        group_ids: Task group of every step, integers [S].

    Returns:
        Step group of every step, int64 [S], numbered by first appearance. O(S).

    Raises:
        ValueError: The lengths differ, or the group ids are no integers.
        TypeError: A key cannot be hashed.
    """
    return _group(keys, group_ids, _number_equal)


def group_similar(
    texts: Sequence[str], group_ids: ArrayLike | Tensor, threshold: float, *, method: str = "leader"
) -> Tensor:
    """Steps of one task group with similar texts form a step group.

    Both methods compare a text with the first member of each cluster, in the order in which the clusters were made,
    and join the first one whose `difflib.SequenceMatcher` ratio reaches the threshold. They differ in the order:

    * `leader`: the distinct texts of a group, most frequent first, ties in lexical order, without difflib's "autojunk"
      shortcut (which ignores frequent letters of texts of 200 letters or more). The partition depends on the texts and
      their numbers alone, not on the order of the batch.
    * `reference`: batch order, autojunk on: the rule of the public GiGPO implementation, for comparison.

    Cost: distinct texts × clusters comparisons in each group, each comparison up to quadratic in the text length.

    Args:
        texts: Text of every step, [S].
        group_ids: Task group of every step, integers [S].
        threshold: Smallest ratio of a match, in [0, 1]; 1 is equality.
        method: `leader` or `reference`.

    Returns:
        Step group of every step, int64 [S], numbered by first appearance.

    Raises:
        ValueError: Threshold outside [0, 1], unknown method, or lengths that differ.
    """
    check_unit("threshold", threshold)
    check_choice("method", method, SIMILARITY_METHODS)
    cluster = _cluster_leader if method == "leader" else _cluster_reference

    def number(members: Iterable[Hashable], numbers: Iterator[int]) -> Iterable[int]:
        clusters = cluster([str(text) for text in members], threshold)
        return _number_equal(clusters, numbers)

    return _group(texts, group_ids, number)


def _group(
    keys: Sequence[Hashable] | NDArray[Any] | Tensor, group_ids: ArrayLike | Tensor, number: _Numbering
) -> Tensor:
    """Apply `number` to the keys of one task group after the other; small dictionaries keep the cost linear."""
    if isinstance(keys, Tensor):
        keys = as_array(keys)
    n_steps = len(keys)
    groups = read_integers("group_ids", group_ids, n_steps)
    if n_steps == 0:
        return torch.zeros(0, dtype=torch.int64)
    order = sorting_order(groups)
    runs = pairwise(run_bounds(groups if order is None else groups[order]).tolist())
    numbers = count()
    labels = (
        label
        for lo, hi in runs
        for label in number(_members(keys, slice(lo, hi) if order is None else order[lo:hi]), numbers)
    )
    step_groups = np.fromiter(labels, dtype=np.int64, count=n_steps)
    return torch.from_numpy(step_groups if order is None else _by_first_appearance(step_groups, order))


def _members(keys: Sequence[Hashable] | NDArray[Any], positions: slice | Ints) -> Iterable[Hashable]:
    if isinstance(keys, np.ndarray):
        members: list[Hashable] = keys[positions].tolist()
        return members
    if isinstance(positions, slice):
        return keys[positions]
    first, *others = positions.tolist()
    if not others:
        return [keys[first]]
    return itemgetter(first, *others)(keys)  # all at once, so that waits for memory overlap; one alone comes bare


def _number_equal(keys: Iterable[Hashable], numbers: Iterator[int]) -> Iterable[int]:
    table: defaultdict[Hashable, int] = defaultdict(numbers.__next__)
    return map(table.__getitem__, keys)


def _by_first_appearance(labels: Ints, order: Ints) -> Ints:
    """Rename the labels 0, 1, … of the records at `order` so that they first appear in rising order of the batch."""
    first = np.empty(int(labels.max()) + 1, dtype=np.int64)
    first[labels[::-1]] = order[::-1]  # the last write wins: the earliest position
    by_position = sorting_order(first)
    rank = np.arange(len(first))
    if by_position is not None:
        rank[by_position] = np.arange(len(first))
    renamed = np.empty_like(labels)
    for lo in range(0, len(labels), CHUNK_RECORDS):  # no temporary of the whole length
        chunk = slice(lo, lo + CHUNK_RECORDS)
        renamed[order[chunk]] = rank[labels[chunk]]
    return renamed


def _cluster_reference(texts: Sequence[str], threshold: float) -> list[int]:
    """Greedy clusters in batch order; the result depends on that order."""
    leaders: list[str] = []
    known: dict[str, int] = {}
    for text in texts:
        if text in known:  # the same text meets the same leaders: the same answer, as clusters are only appended
            continue
        matches = (i for i, leader in enumerate(leaders) if SequenceMatcher(None, text, leader).ratio() >= threshold)
        known[text] = next(matches, len(leaders))
        if known[text] == len(leaders):
            leaders.append(text)
    return [known[text] for text in texts]


def _cluster_leader(texts: Sequence[str], threshold: float) -> list[int]:
    """Greedy clusters in an order that the texts alone decide."""
    frequency: defaultdict[str, int] = defaultdict(int)
    for text in texts:
        frequency[text] += 1
    leaders: list[str] = []
    known: dict[str, int] = {}
    for text in sorted(frequency, key=lambda t: (-frequency[t], t)):
        matches = (i for i, leader in enumerate(leaders) if _is_similar(text, leader, threshold))
        known[text] = next(matches, len(leaders))
        if known[text] == len(leaders):
            leaders.append(text)
    return [known[text] for text in texts]


def _is_similar(text: str, leader: str, threshold: float) -> bool:
    """Whether the ratio reaches the threshold; difflib's two cheap upper bounds first."""
    matcher = SequenceMatcher(None, text, leader, autojunk=False)
    return (
        matcher.real_quick_ratio() >= threshold and matcher.quick_ratio() >= threshold and matcher.ratio() >= threshold
    )
