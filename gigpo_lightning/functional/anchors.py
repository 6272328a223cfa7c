"""Which steps left the same state: step groups from anchor keys, from texts, or from embeddings.

Groups are always formed inside one task group: equal keys of different tasks are never merged. Nothing here knows about
rewards, episodes or tokens. Step groups are numbered 0, 1, … in the order in which they first appear in the batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import count, pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from .clusters import ROUND_OFF, Alike, alike_by_ratio, leader_clusters, reference_clusters
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
    and join the first one whose ratio reaches the threshold. They differ in the order and in the ratio:

    * `leader`: the distinct texts of a group, most frequent first, ties in lexical order; ratio 2·LCS / T, with the
      longest common subsequence LCS and the letters T of both texts (rapidfuzz's normalized Indel similarity). The
      partition depends on the texts and their numbers alone, not on the order of the batch.
    * `reference`: batch order; `difflib.SequenceMatcher` ratio with its "autojunk" shortcut, which ignores frequent
      letters of texts of 200 letters or more: the rule of the public GiGPO implementation, for comparison.

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
    if method == "reference":
        return _group(texts, group_ids, _by_clusters(lambda members: reference_clusters(members, threshold)))
    return _group_alike(texts, group_ids, alike_by_ratio(threshold))


def group_embedded(texts: Sequence[str], group_ids: ArrayLike | Tensor, embeddings: Tensor, threshold: float) -> Tensor:
    """Steps of one task group whose texts lie in nearly the same direction form a step group.

    A text joins the first leader with cosine ≥ threshold; leaders are made as by `group_similar`'s `leader`. Equal
    texts are always together.

    Args:
        texts: Text of every step, [S].
        group_ids: Task group of every step, integers [S].
        embeddings: One row for each distinct text, in lexical order of the texts, [distinct texts, width].
        threshold: Smallest cosine of a match, in [0, 1].

    Returns:
        Step group of every step, int64 [S], numbered by first appearance.

    Raises:
        ValueError: Threshold outside [0, 1], lengths that differ, or an embedding that is not finite.
    """
    check_unit("threshold", threshold)
    row_of = {text: row for row, text in enumerate(sorted(set(texts)))}
    if embeddings.ndim != 2 or len(embeddings) != len(row_of):
        raise ValueError(
            f"embeddings: shape {tuple(embeddings.shape)}; expected one row for each of {len(row_of)} texts"
        )
    vectors = embeddings.detach().cpu().to(torch.float64).numpy()
    if not np.isfinite(vectors).all():
        raise ValueError("embeddings: one is not finite")
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)

    def alike(leader: str, others: Sequence[str]) -> NDArray[np.bool_]:
        return np.asarray(unit[[row_of[text] for text in others]] @ unit[row_of[leader]] >= threshold - ROUND_OFF)

    return _group_alike(texts, group_ids, alike)


def separate(step_group_ids: Tensor, keep_mask: Tensor) -> Tensor:
    """Give every step outside the mask a step group of its own.

    Args:
        step_group_ids: Step group of every step, int64 [S], each ≥ 0.
        keep_mask: True where the step stays in its group, bool [S].

    Returns:
        Step group of every step, int64 [S], numbered from 0 without gaps.
    """
    alone = torch.arange(len(step_group_ids)) + int(step_group_ids.max()) + 1 if len(step_group_ids) else step_group_ids
    return torch.where(keep_mask, step_group_ids, alone).unique(return_inverse=True)[1]


def _group_alike(texts: Sequence[str], group_ids: ArrayLike | Tensor, alike: Alike) -> Tensor:
    return _group(texts, group_ids, _by_clusters(lambda members: leader_clusters(members, alike)))


def _by_clusters(cluster: Callable[[Sequence[str]], list[int]]) -> _Numbering:
    """The numbering of a task group's members by their clusters."""

    def number(members: Iterable[Hashable], numbers: Iterator[int]) -> Iterable[int]:
        return _number_equal(cluster([str(text) for text in members]), numbers)

    return number


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
