"""Step groups: against the brute-force oracle, and what must not change them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gigpo_lightning.functional.anchors import group_exact, group_similar, separate
from tests.functional import oracle

STEPS = st.lists(st.tuples(st.integers(-3, 3), st.sampled_from(["a", "b", "c", ""])), min_size=1, max_size=40)
TEXTS = st.lists(st.tuples(st.integers(0, 1), st.text("ab ", max_size=6)), min_size=1, max_size=15)


def partition(labels: torch.Tensor) -> set[frozenset[int]]:
    return {frozenset((labels == label).nonzero().flatten().tolist()) for label in labels.unique()}


@given(STEPS)
def test_exact_is_the_oracle(steps: list[tuple[int, str]]) -> None:
    groups, keys = [g for g, _ in steps], [k for _, k in steps]
    found = group_exact(keys, groups)
    assert found.dtype == torch.int64
    assert found.tolist() == oracle.group_exact(keys, groups)


@given(STEPS)
def test_keys_in_an_array_are_the_keys_in_a_list(steps: list[tuple[int, str]]) -> None:
    groups, keys = [g for g, _ in steps], [ord(k or " ") for _, k in steps]
    wanted = group_exact(keys, groups)
    assert torch.equal(group_exact(np.array(keys), groups), wanted)
    assert torch.equal(group_exact(torch.tensor(keys), groups), wanted)


@given(STEPS, st.randoms(use_true_random=False))
def test_exact_does_not_depend_on_the_order(steps: list[tuple[int, str]], rng: random.Random) -> None:
    order = list(range(len(steps)))
    rng.shuffle(order)
    found = group_exact([k for _, k in steps], [g for g, _ in steps])
    shuffled = group_exact([steps[i][1] for i in order], [steps[i][0] for i in order])
    assert partition(shuffled) == {frozenset(order.index(i) for i in members) for members in partition(found)}


def test_exact_takes_any_hashables_and_any_ids() -> None:
    # ids that span more than 16 and more than 32 bits need several passes of the counting sort
    groups = np.array([2**40, -5, 70_000, 2**40, -5, 70_000])
    assert group_exact([("k", 1), ("k", 1), 3, ("k", 1), ("k", 2), 3], groups).tolist() == [0, 1, 2, 0, 3, 2]
    assert group_exact(["k", "k", "k"], [4464, 4464 + 2**16, 4464]).tolist() == [0, 1, 0]
    assert group_exact(torch.tensor([7, 7, 8]), torch.tensor([0, 0, 0])).tolist() == [0, 0, 1]
    assert group_exact([], []).shape == (0,)


def test_equal_keys_of_two_tasks_are_two_groups() -> None:
    assert group_exact(["s", "s"], [0, 1]).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("keys", "groups", "message"),
    [
        (["a", "b"], [0], r"group_ids: shape \(1,\); expected one per record, \[2\]"),
        (["a"], [0.5], "float64 values; expected integers"),
    ],
)
def test_exact_refuses(keys: list[str], groups: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_exact(keys, groups)


@given(TEXTS, st.sampled_from([0.0, 0.5, 0.8, 1.0]))
def test_reference_is_the_oracle(steps: list[tuple[int, str]], threshold: float) -> None:
    groups, texts = [g for g, _ in steps], [t for _, t in steps]
    found = group_similar(texts, groups, threshold, method="reference")
    assert found.tolist() == oracle.group_reference(texts, groups, threshold)


@given(TEXTS, st.sampled_from([0.0, 0.3, 0.5, 0.8]), st.randoms(use_true_random=False))
def test_leader_does_not_depend_on_the_order(
    steps: list[tuple[int, str]], threshold: float, rng: random.Random
) -> None:
    order = list(range(len(steps)))
    rng.shuffle(order)
    found = group_similar([t for _, t in steps], [g for g, _ in steps], threshold)
    shuffled = group_similar([steps[i][1] for i in order], [steps[i][0] for i in order], threshold)
    assert partition(shuffled) == {frozenset(order.index(i) for i in members) for members in partition(found)}


def test_the_reference_does_depend_on_it() -> None:
    # A ~ B and B ~ C at 0.85 (9 of 10 letters: ratio 0.9), A and C are not (8 of 10: 0.8)
    a, b, c = "abcdefghij", "abcdefghiX", "abcdefghYX"
    assert partition(group_similar([a, b, c], [0, 0, 0], 0.85, method="reference")) == {
        frozenset({0, 1}),
        frozenset({2}),
    }
    assert partition(group_similar([b, a, c], [0, 0, 0], 0.85, method="reference")) == {frozenset({0, 1, 2})}
    # leader: all occur once, so lexical order decides: capitals first: C, then B joins C, then A opens its own
    assert partition(group_similar([a, b, c], [0, 0, 0], 0.85)) == {frozenset({0}), frozenset({1, 2})}
    # B twice makes it the leader, and both others join it
    assert partition(group_similar([a, b, c, b], [0] * 4, 0.85)) == {frozenset({0, 1, 2, 3})}


@given(TEXTS)
def test_leader_at_threshold_one_is_exact(steps: list[tuple[int, str]]) -> None:
    groups, texts = [g for g, _ in steps], [t for _, t in steps]
    assert group_similar(texts, groups, 1.0).tolist() == group_exact(texts, groups).tolist()


def test_leader_does_without_the_shortcut_for_long_texts() -> None:
    # over 200 letters difflib's autojunk drops the frequent ones from one side only
    a = "the shelf holds a red mug and a blue book " * 6
    b = a.replace("mug", "cup")
    assert group_similar([a, b], [0, 0], 0.9).tolist() == [0, 0]
    assert group_similar([b, a], [0, 0], 0.9).tolist() == [0, 0]


@pytest.mark.parametrize("threshold", [-0.1, 1.01, float("nan")])
def test_similar_refuses_a_threshold(threshold: float) -> None:
    with pytest.raises(ValueError, match=r"threshold: .* is outside \[0, 1\]"):
        group_similar(["a"], [0], threshold)


def test_similar_refuses_a_method() -> None:
    with pytest.raises(ValueError, match="method: 'fuzzy' is unknown; choose one of leader, reference"):
        group_similar(["a"], [0], 0.9, method="fuzzy")


def longest_common(a: str, b: str) -> int:
    """Length of the longest common subsequence, by the textbook's table."""
    row = [0] * (len(b) + 1)
    for letter in a:
        before = 0
        for j, other in enumerate(b, start=1):
            before, row[j] = row[j], before + 1 if letter == other else max(row[j], row[j - 1])
    return row[-1]


@given(TEXTS, st.sampled_from([0.0, 0.3, 0.5, 0.8, 1.0]))
def test_leader_is_the_oracle(steps: list[tuple[int, str]], threshold: float) -> None:
    def like(a: str, b: str) -> bool:
        return 2 * longest_common(a, b) >= threshold * (len(a) + len(b)) - 1e-7  # two empty texts: 0 ≥ 0

    found = group_similar([t for _, t in steps], [g for g, _ in steps], threshold)
    for g in {g for g, _ in steps}:
        texts = [t for group, t in steps if group == g]
        leaders: list[str] = []
        for text in sorted(set(texts), key=lambda t: (-texts.count(t), t)):
            if not any(like(text, leader) for leader in leaders):
                leaders.append(text)
        wanted = [next(i for i, leader in enumerate(leaders) if like(text, leader)) for text in texts]
        own = found[[i for i, (group, _) in enumerate(steps) if group == g]]
        assert partition(own) == partition(torch.tensor(wanted))


@pytest.mark.parametrize(
    ("step_groups", "keep", "wanted"),
    [([0, 0, 1, 0], [1, 0, 1, 1], {frozenset({0, 3}), frozenset({1}), frozenset({2})}), ([], [], set())],
)
def test_separate(step_groups: list[int], keep: list[int], wanted: set[frozenset[int]]) -> None:
    found = separate(torch.tensor(step_groups, dtype=torch.int64), torch.tensor(keep, dtype=torch.bool))
    assert partition(found) == wanted
    assert sorted(found.unique().tolist()) == list(range(len(wanted)))


@pytest.mark.parametrize("changed", range(0, 501, 10))
def test_leader_joins_at_the_very_threshold(changed: int) -> None:
    a, b = "x" * 1000, "x" * (1000 - changed) + "y" * changed  # LCS: 1000 − changed of 2000 letters
    assert group_similar([a, b], [0, 0], 1 - changed / 1000).tolist() == [0, 0]
    assert group_similar([a, b], [0, 0], min(1.0, 1 - changed / 1000 + 1e-6)).tolist() == [0, int(changed > 0)]
