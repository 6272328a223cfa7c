"""What a few seeds say: means with intervals, differences, and when a curve crosses a rate. Pure; knows no files.

A seed is one whole run, and runs are what is resampled: episodes of one run are not independent. With 3 to 5 seeds a
bootstrap interval is on the narrow side; it says how far the seeds lie apart, not more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95
_RESAMPLES = 9999
_SEED = 0  # the same runs give the same table

Point = tuple[float, float]  # environment steps, success rate


class Summary(NamedTuple):
    """Of n values: mean and interquartile mean with their intervals, and the sample variance (None for one value)."""

    n: int
    mean: float
    mean_ci: tuple[float, float] | None
    iqm: float
    iqm_ci: tuple[float, float] | None
    variance: float | None


class Difference(NamedTuple):
    """Of a variant to the first one: mean over the seeds that both have, its interval, P(better) over all pairs."""

    seeds: int
    mean: float
    ci: tuple[float, float] | None
    better: float


def summarise(values: Sequence[float]) -> Summary:
    """The figures of one variant.

    Args:
        values: One figure per seed, at least one.
    """
    data = np.asarray(values, dtype=float)
    variance = float(data.var(ddof=1)) if len(data) > 1 else None
    return Summary(
        len(data),
        float(data.mean()),
        interval(data, _mean),
        float(interquartile_mean(data)),
        interval(data, interquartile_mean),
        variance,
    )


def difference(ours: dict[int, float], theirs: dict[int, float]) -> Difference | None:
    """How much better `ours` is than `theirs`, both by seed; None where no seed is in both.

    The same seed has the same tasks in both, so differences are taken seed by seed. P(better) is the share of all pairs
    of one run each in which ours wins, ties counting one half (Agarwal et al. 2021, arXiv 2108.13264, section 4.3).
    """
    both = sorted(set(ours) & set(theirs))
    if not both:
        return None
    apart = np.array([ours[seed] - theirs[seed] for seed in both])
    pairs = np.subtract.outer(np.array(list(ours.values())), np.array(list(theirs.values())))
    better = float(np.mean((pairs > 0) + 0.5 * (pairs == 0)))
    return Difference(len(both), float(apart.mean()), interval(apart, _mean), better)


def interval(values: np.ndarray, statistic: object) -> tuple[float, float] | None:
    """The 95 % percentile bootstrap interval of a statistic over runs; None for fewer than two values."""
    from scipy.stats import bootstrap

    if len(values) < 2:
        return None
    if np.ptp(values) == 0:  # every resample is the same
        return float(values[0]), float(values[0])
    found = bootstrap(
        (values,),
        statistic,
        n_resamples=_RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(_SEED),
    ).confidence_interval
    return float(found.low), float(found.high)


def interquartile_mean(values: np.ndarray, axis: int = -1) -> np.ndarray:
    """The mean of the middle half: ⌊n/4⌋ values are left out at each end; with three or fewer it is the mean."""
    from scipy.stats import trim_mean

    return np.asarray(trim_mean(values, 0.25, axis=axis))


def crossing(curve: Sequence[Point], threshold: float) -> float:
    """Environment steps after which a curve is first at or above `threshold`, in a straight line between its points.

    Infinite where it never is.
    """
    for number, (steps, rate) in enumerate(curve):
        if rate < threshold:
            continue
        if number == 0:
            return steps
        steps_before, rate_before = curve[number - 1]
        return steps_before + (steps - steps_before) * (threshold - rate_before) / (rate - rate_before)
    return math.inf


def mean_rate(curve: Sequence[Point]) -> float:
    """The mean of a curve over its environment steps (the area under it ÷ their range)."""
    steps, rates = np.array(curve, dtype=float).T
    span = steps[-1] - steps[0]
    return float(np.sum((rates[1:] + rates[:-1]) / 2 * np.diff(steps)) / span) if span > 0 else float(rates[-1])


def on_grid(curve: Sequence[Point], grid: np.ndarray) -> np.ndarray:
    """A curve at the steps of `grid`, in straight lines; NaN outside of its range."""
    steps, rates = np.array(curve, dtype=float).T
    return np.interp(grid, steps, rates, left=np.nan, right=np.nan)


def _mean(values: np.ndarray, axis: int = -1) -> np.ndarray:
    return np.asarray(np.mean(values, axis=axis))
