"""Schedules: worked numbers, limits, and refused input."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gigpo_lightning.functional.schedules import SCHEDULES, boosted, lambda_schedule, make_schedule

LINE: dict[str, float] = {"start": 1.0, "end": 0.2, "span": 10}


def test_the_published_schedule() -> None:
    # max(0.5, 1 − epoch / 100)
    assert [lambda_schedule(k) for k in (0, 1, 25, 50, 51, 1000)] == pytest.approx([1, 0.99, 0.75, 0.5, 0.5, 0.5])
    assert [lambda_schedule(k, start=0.9, minimum=0.7, span=20) for k in (0, 2, 9)] == pytest.approx([0.9, 0.8, 0.7])


@pytest.mark.parametrize(
    ("name", "options", "wanted"),
    [
        ("published", {}, [1.0, 0.95, 0.9, 0.5]),
        ("constant", {"start": 0.8}, [0.8, 0.8, 0.8, 0.8]),
        ("linear", LINE, [1.0, 0.6, 0.2, 0.2]),
        # half a cosine: at a half of the span it is half-way
        ("cosine", LINE, [1.0, 0.6, 0.2, 0.2]),
        # 0.2 + 0.8 e^(−k / 10)
        ("exponential", LINE, [1.0, 0.2 + 0.8 * math.exp(-0.5), 0.2 + 0.8 / math.e, 0.2]),
    ],
)
def test_by_name(name: str, options: dict[str, float], wanted: list[float]) -> None:
    schedule = make_schedule(name, **options)
    assert [schedule(k) for k in (0, 5, 10, 10_000)] == pytest.approx(wanted)


def test_cosine_is_no_line() -> None:
    # a fifth of the way: 0.2 + 0.8 · (1 + cos 36°) / 2
    assert make_schedule("cosine", **LINE)(2) == pytest.approx(0.2 + 0.4 * (1 + math.cos(math.pi / 5)))


@given(st.sampled_from(["linear", "cosine", "exponential"]), st.integers(0, 40), st.floats(-2, 2), st.floats(-2, 2))
def test_between_start_and_end_and_towards_the_end(name: str, k: int, start: float, end: float) -> None:
    schedule = make_schedule(name, start=start, end=end, span=20)
    assert min(start, end) - 1e-12 <= schedule(k) <= max(start, end) + 1e-12
    assert abs(schedule(k + 1) - end) <= abs(schedule(k) - end) + 1e-12


def test_boost_after_a_promotion() -> None:
    # 0.4 · (1 + 0.5 · (1 − n / 4))
    found = [boosted(0.4, 0.5, n, 4) for n in (None, 0, 1, 2, 4, 9)]
    assert found == pytest.approx([0.4, 0.6, 0.55, 0.5, 0.4, 0.4])
    assert boosted(0.4, 0.0, 0, 4) == 0.4


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("quadratic", {}, "schedule: 'quadratic' is unknown; choose one of published, constant, linear"),
        ("published", {"start": 1.1}, r"start: λ = 1.1 is outside \[0, 1\]"),
        ("published", {"start": 0.4}, r"minimum: λ = 0.5 is outside \[0, start = 0.4\]"),
        ("published", {"span": 0}, "span: 0 is not a positive number of iterations"),
        ("linear", {"start": 1.0, "end": 0.0}, "span: missing; the linear schedule takes start, end, span"),
        ("linear", {**LINE, "minimum": 0.1}, "minimum: not an option of the linear schedule"),
        ("cosine", {**LINE, "span": -1}, "span: -1 is not a positive"),
        ("constant", {"start": float("nan")}, "start: nan is not a finite number"),
        ("exponential", {**LINE, "span": float("inf")}, "span: inf is not a finite number"),
    ],
)
def test_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_schedule(name, **options)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_negative_iteration_is_refused(name: str) -> None:
    schedule = make_schedule(name, **{} if name == "published" else {"start": 0.5} if name == "constant" else LINE)
    with pytest.raises(ValueError, match="iteration: -1 is negative"):
        schedule(-1)


@pytest.mark.parametrize(
    ("boost", "since", "decay", "message"),
    [(-1, 0, 5, "boost: -1"), (0.5, 0, 0, "decay_iterations: 0"), (0.5, -2, 5, "iteration: -2 is negative")],
)
def test_boost_refused(boost: float, since: int, decay: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        boosted(1.0, boost, since, decay)
