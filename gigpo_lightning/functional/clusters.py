"""Texts of one task group gathered into clusters around leaders, by any measure of likeness.

A text joins the first leader, in the order in which the leaders were made, that it is like; one that is like none is
the next leader. Knows nothing of task groups, turns or policies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from itertools import compress

import numpy as np
from numpy.typing import NDArray
from rapidfuzz.distance import Indel
from rapidfuzz.process import cdist

Alike = Callable[[str, Sequence[str]], NDArray[np.bool_]]
"""From a leader and other texts: which of these are like it, [texts]."""

# Far below the step between two ratios of texts of a megabyte, far above the round-off of a quotient.
ROUND_OFF = 1e-9
# rapidfuzz 3.14 loses a ratio of 0.8 at a cutoff of 0.8 − 1e-9, but not at 0.8 − 1e-6.
_CUTOFF_MARGIN = 1e-3


def leader_clusters(texts: Sequence[str], alike: Alike) -> list[int]:
    """Clusters that depend on the texts and their numbers alone, not on their order.

    The most frequent text leads first, of equally frequent ones the first in lexical order. Cost: distinct texts ×
    clusters comparisons.

    Args:
        texts: Any texts, [n].
        alike: The measure.

    Returns:
        The cluster of each text, [n], numbered in the order of the leaders.
    """
    frequency = Counter(texts)
    waiting = sorted(frequency, key=lambda text: (-frequency[text], text))
    known: dict[str, int] = {}
    n_clusters = 0
    while waiting:
        leader, *others = waiting
        joins = alike(leader, others) if others else np.zeros(0, bool)
        known[leader] = n_clusters
        known.update((text, n_clusters) for text in compress(others, joins))
        waiting = list(compress(others, ~joins))
        n_clusters += 1
    return [known[text] for text in texts]


def alike_by_ratio(threshold: float) -> Alike:
    """Likeness of texts by their letters: 2·LCS / T ≥ threshold.

    LCS is the length of the longest common subsequence and T the number of letters of both texts; two empty texts have
    ratio 1. This is rapidfuzz's normalized Indel similarity, computed on the bits of machine words. It is symmetric,
    and never below difflib's ratio 2·M / T, whose M counts the letters of the common blocks that difflib happens to
    find.
    """

    def alike(leader: str, others: Sequence[str]) -> NDArray[np.bool_]:
        cutoff = max(threshold - _CUTOFF_MARGIN, 0.0)  # what is below it is given as 0
        ratios = cdist([leader], others, scorer=Indel.normalized_similarity, score_cutoff=cutoff, dtype=np.float64)
        return np.asarray(ratios[0] >= threshold - ROUND_OFF)

    return alike


def reference_clusters(texts: Sequence[str], threshold: float) -> list[int]:
    """Clusters in the order of the batch, on which they depend, by difflib's ratio: as the public implementation."""
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
