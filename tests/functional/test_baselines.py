"""Lone steps against what is known of their state: hand-worked numbers, edges, the bound, any chunks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gigpo_lightning.functional.advantages import normalise_in_groups
from gigpo_lightning.functional.baselines import singleton_advantages


def test_hand_worked() -> None:
    # Earlier returns of state 0: {0, 1, 1, 0}: n = 4, μ = 1/2, variance (4 · 1/4) / 3 = 1/3.
    # R = 1: (1 − 0.5) / (√(1/3) + 1e-6); a penalty of 0.1 makes the score 0.9.
    found = singleton_advantages([1.0, 0.9], [7, 3], [4, 4], [0.5, 0.5], [1 / 3, 1 / 3])
    sigma = (1 / 3) ** 0.5
    assert found.advantage.tolist() == pytest.approx([0.5 / (sigma + 1e-6), 0.4 / (sigma + 1e-6)], rel=1e-12)
    assert found.used.tolist() == [True, True]
    plain = singleton_advantages([1.0, 0.9], [7, 3], [4, 4], [0.5, 0.5], [1 / 3, 1 / 3], norm="none")
    assert plain.advantage.tolist() == pytest.approx([0.5, 0.4])


@pytest.mark.parametrize(
    ("groups", "visits", "variance"),
    [
        ([0, 0], 9, 1.0),  # a group of two has its own comparison
        ([0, 1], 0, 0.0),  # unknown
        ([0, 1], 1, 0.0),  # one visit has no spread
        ([0, 1], 9, 0.0),  # nor have equal returns
        ([0, 1], 9, (0.3 * 1e-10) ** 2),  # up to round-off
    ],
)
@pytest.mark.parametrize("norm", ["std", "none"])
def test_where_nothing_is_known_it_is_zero(groups: list[int], visits: int, variance: float, norm: str) -> None:
    found = singleton_advantages([1.0, 0.5], groups, [visits] * 2, [0.3] * 2, [variance] * 2, norm=norm)
    assert found.advantage.tolist() == [0.0, 0.0]
    assert found.used.tolist() == [False, False]


def test_a_return_beyond_all_earlier_ones_is_bounded() -> None:
    # {0.81, 0.82}: σ = 0.00707. R = 0 would be −115; a member of a group of three is never beyond 2/√3.
    values = np.array([0.81, 0.82])
    found = singleton_advantages([0.0, 9.0], [0, 1], [2, 2], [values.mean()] * 2, [values.var(ddof=1)] * 2)
    assert found.advantage.tolist() == pytest.approx([-2 / 3**0.5, 2 / 3**0.5])


@given(st.lists(st.integers(-50, 50), min_size=2, max_size=30).filter(lambda values: len(set(values)) > 1))
def test_a_return_that_was_seen_before_is_never_cut(seen: list[int]) -> None:
    mean, variance = np.mean(seen), np.var(seen, ddof=1)
    for value in seen:
        found = singleton_advantages([value], [0], [len(seen)], [mean], [variance])
        assert float(found.advantage[0]) == pytest.approx((value - mean) / (variance**0.5 + 1e-6))


def test_the_bound_is_that_of_a_group() -> None:
    """One value far from n equal ones is the extreme of a group of n + 1."""
    group = normalise_in_groups([1e6, 0.0, 0.0, 0.0], [0] * 4)
    assert float(group[0]) == pytest.approx(3 / 4**0.5, rel=1e-6)


@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_chunks_of_whole_groups_change_nothing(seed: int, parts: int) -> None:
    random = np.random.default_rng(seed)
    n = 24
    groups = np.sort(random.integers(0, 20, n))
    columns = (random.normal(size=n), groups, random.integers(0, 4, n), random.normal(size=n), random.random(n))
    whole = singleton_advantages(*columns)
    cuts = np.unique(np.searchsorted(groups, random.integers(0, 21, parts)))
    found = [singleton_advantages(*chunk) for chunk in zip(*(np.split(c, cuts) for c in columns), strict=True)]
    assert np.concatenate([part.advantage for part in found]).tolist() == whole.advantage.tolist()
    assert np.concatenate([part.used for part in found]).tolist() == whole.used.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"variance": [-1.0]}, "variance: -1.0 is negative"),
        ({"mean": [float("nan")]}, "mean: nan at record 0"),
        ({"visits": [1, 2]}, r"visits: shape \(2,\)"),
        ({"norm": "max"}, "norm: 'max' is unknown"),
        ({"eps": 0.0}, "eps: 0.0 is not positive"),
    ],
)
def test_bad_input(change: dict, message: str) -> None:
    options = {"scores": [1.0], "step_group_ids": [0], "visits": [2], "mean": [0.0], "variance": [1.0]} | change
    with pytest.raises(ValueError, match=message):
        singleton_advantages(**options)


def test_nothing_is_nothing() -> None:
    assert singleton_advantages([], np.zeros(0, np.int64), [], [], []).advantage.tolist() == []
