"""Similarity and embedding detectors: options, and that neither the order of the turns nor other tasks matter."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gigpo_lightning.detectors import Detector, EmbeddingDetector, SimilarityDetector, TurnTable
from gigpo_lightning.functional.anchors import group_embedded
from tests.detectors.tables import make_table, make_turn, of_texts, pairs, partition

STEPS = st.lists(st.tuples(st.integers(0, 2), st.text("ab ", max_size=6)), min_size=1, max_size=20)
DETECTORS = st.sampled_from([0.0, 0.3, 0.7, 0.9, 1.0]).flatmap(
    lambda threshold: st.sampled_from([SimilarityDetector(threshold), EmbeddingDetector(threshold)])
)


def by_letters(texts: Sequence[str]) -> torch.Tensor:
    """An embedding for tests: how often each letter occurs, and a direction that all share."""
    return torch.tensor([[text.count("a"), text.count("b"), text.count(" "), 1.0] for text in texts])


def table_of(steps: Sequence[tuple[int, str]]) -> TurnTable:
    return make_table([make_turn(observation=text) for _, text in steps], [g for g, _ in steps], embed=by_letters)


@settings(deadline=None)
@given(STEPS, DETECTORS, st.randoms(use_true_random=False))
def test_order_does_not_matter(steps: list[tuple[int, str]], detector: Detector, rng: random.Random) -> None:
    order = list(range(len(steps)))
    rng.shuffle(order)
    found = detector.detect(table_of(steps))
    shuffled = detector.detect(table_of([steps[i] for i in order]))
    assert partition(shuffled) == {frozenset(order.index(i) for i in members) for members in partition(found)}


@settings(deadline=None)
@given(STEPS, DETECTORS)
def test_tasks_stay_apart(steps: list[tuple[int, str]], detector: Detector) -> None:
    groups = torch.tensor([g for g, _ in steps])
    found = detector.detect(table_of(steps))
    assert all(len(groups[found == step_group].unique()) == 1 for step_group in found.unique())
    # and what other tasks hold does not matter: each by itself gives the same
    for g in groups.unique().tolist():
        own = [step for step in steps if step[0] == g]
        assert partition(detector.detect(table_of(own))) == partition(found[groups == g])


def test_the_threshold_of_similarity() -> None:
    # 2·LCS / T: "abcd" and "abxd" share abd: 6/8
    assert pairs(SimilarityDetector(0.75).detect(of_texts("abcd", "abxd"))) == {frozenset({0, 1})}
    assert pairs(SimilarityDetector(0.76).detect(of_texts("abcd", "abxd"))) == set()


def test_the_method_of_similarity() -> None:
    a, b, c = "aaaaaa", "aaaabb", "aabbbb"  # neighbours share 4 of 6 letters: 0.67; the outer ones 2 of 6: 0.33
    leader = SimilarityDetector(0.6).detect(of_texts(b, a, c))
    reference = SimilarityDetector(0.6, method="reference").detect(of_texts(b, a, c))
    assert pairs(leader) == {frozenset({0, 1})}  # lexical order: a leads, b joins it, c does not
    assert pairs(reference) == {frozenset({0, 1, 2})}  # b comes first, and both are like it


def test_the_threshold_of_embeddings() -> None:
    # directions at 0°, 30° and 90°: cosines 0.87, 0.5 and 0
    vectors = {"a": [2.0, 0.0], "b": [3**0.5 / 2, 0.5], "c": [0.0, 1.0]}
    turns = [make_turn(observation=text) for text in "abca"]
    table = make_table(turns, embed=lambda texts: torch.tensor([vectors[text] for text in texts]))
    assert pairs(EmbeddingDetector(0.9).detect(table)) == {frozenset({0, 3})}
    assert pairs(EmbeddingDetector(0.8).detect(table)) == {frozenset({0, 1, 3})}
    assert pairs(EmbeddingDetector(0.0).detect(table)) == {frozenset({0, 1, 2, 3})}


def test_each_text_is_embedded_once() -> None:
    asked: list[str] = []

    def embed(texts: Sequence[str]) -> torch.Tensor:
        asked.extend(texts)
        return by_letters(texts)

    table = make_table([make_turn(observation=text) for text in ("b", "a", "b", "a")], [0, 0, 1, 1], embed=embed)
    EmbeddingDetector().detect(table)
    assert asked == ["a", "b"]


def test_embeddings_need_a_policy() -> None:
    with pytest.raises(ValueError, match="no policy to ask for embeddings"):
        EmbeddingDetector().detect(of_texts("a"))


@pytest.mark.parametrize(
    ("embeddings", "message"),
    [
        (torch.ones(3, 2), r"shape \(3, 2\); expected one row for each of 2 texts"),
        (torch.full((2, 2), float("nan")), "not finite"),
    ],
)
def test_wrong_embeddings_are_refused(embeddings: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_embedded(["a", "b", "a"], [0, 0, 0], embeddings, 0.9)


@pytest.mark.parametrize("kind", [SimilarityDetector, EmbeddingDetector])
@pytest.mark.parametrize("threshold", [-0.1, 1.1, float("nan")])
def test_refused_thresholds(kind: type[SimilarityDetector] | type[EmbeddingDetector], threshold: float) -> None:
    with pytest.raises(ValueError, match=rf"{kind.__name__}.threshold={threshold}: must lie in \[0, 1\]"):
        kind(threshold)


def test_refused_method_and_band() -> None:
    with pytest.raises(ValueError, match=r"SimilarityDetector.method='fuzzy': choose one of leader, reference"):
        SimilarityDetector(method="fuzzy")
    with pytest.raises(ValueError, match=r"EmbeddingDetector.target_density=\[0.5, 1.5\]: must be \[low, high\]"):
        EmbeddingDetector(target_density=(0.5, 1.5))
