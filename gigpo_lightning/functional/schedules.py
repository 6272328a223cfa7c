"""Schedules: a number as a pure function of the iteration k. They hold no state, so a resume cannot disturb them."""

from __future__ import annotations

import math
from collections.abc import Callable

Schedule = Callable[[int], float]


def lambda_schedule(iteration: int, *, start: float = 1.0, minimum: float = 0.5, span: float = 100.0) -> float:
    """The published decay of the global share: λ(k) = max(λ_min, λ_0 − k / K).

    With the defaults it is max(0.5, 1 − k / 100). λ_0 = λ_min is constant.

    Args:
        iteration: k ≥ 0.
        start: λ_0 in [0, 1].
        minimum: λ_min in [0, λ_0].
        span: K > 0: iterations in which λ would fall by 1.

    Raises:
        ValueError: A number outside its range.
    """
    if not 0.0 <= start <= 1.0:
        raise ValueError(f"start: λ = {start} is outside [0, 1]")
    if not 0.0 <= minimum <= start:
        raise ValueError(f"minimum: λ = {minimum} is outside [0, start = {start}]")
    _check_span("span", span)
    _check_iteration(iteration)
    return max(minimum, start - iteration / span)


def constant(iteration: int, *, start: float) -> float:
    """`start` at every iteration."""
    _check_iteration(iteration)
    return start


def linear(iteration: int, *, start: float, end: float, span: float) -> float:
    """From `start` to `end` in a straight line within `span` iterations, then `end`."""
    return start + (end - start) * _progress(iteration, span)


def cosine(iteration: int, *, start: float, end: float, span: float) -> float:
    """From `start` to `end` along half a cosine within `span` iterations, then `end`."""
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * _progress(iteration, span)))


def exponential(iteration: int, *, start: float, end: float, span: float) -> float:
    """Towards `end` with time constant `span`: end + (start − end) · exp(−k / span); never quite there."""
    _check_span("span", span)
    _check_iteration(iteration)
    return end + (start - end) * math.exp(-iteration / span)


def boosted(value: float, boost: float, iterations_since: int | None, decay_iterations: float) -> float:
    """A value raised after a promotion and returning to normal: v · (1 + b · max(0, 1 − n / N)).

    Args:
        value: v, what the schedule says (a temperature, an entropy coefficient).
        boost: b ≥ 0: 0.5 raises by half at the promotion; 0 is off.
        iterations_since: n ≥ 0, iterations since the last promotion; None before the first.
        decay_iterations: N > 0, iterations until the boost is gone.

    Raises:
        ValueError: A number outside its range.
    """
    if not 0.0 <= boost < math.inf:
        raise ValueError(f"boost: {boost} is not a number >= 0; 0 is off, 0.5 raises by half")
    _check_span("decay_iterations", decay_iterations)
    if iterations_since is None:
        return value
    _check_iteration(iterations_since)
    return value * (1.0 + boost * max(0.0, 1.0 - iterations_since / decay_iterations))


SCHEDULES: dict[str, Callable[..., float]] = {
    "published": lambda_schedule,
    "constant": constant,
    "linear": linear,
    "cosine": cosine,
    "exponential": exponential,
}


def make_schedule(name: str, **options: float) -> Schedule:
    """The schedule of that name with its options bound, checked at once by evaluating it at iteration 0.

    Args:
        name: `published` (start, minimum, span), `constant` (start), or `linear`, `cosine`, `exponential` (start, end,
            span).
        options: The schedule's numbers.

    Raises:
        ValueError: Unknown name, missing or unknown option, or a number outside its range.
    """
    if not isinstance(name, str) or name not in SCHEDULES:  # from YAML it may be a list
        raise ValueError(f"schedule: {name!r} is unknown; choose one of {', '.join(SCHEDULES)}")
    function = SCHEDULES[name]
    allowed = [key for key in function.__annotations__ if key not in ("iteration", "return")]
    unknown = [key for key in options if key not in allowed]
    if unknown:
        raise ValueError(f"{unknown[0]}: not an option of the {name} schedule; it takes {', '.join(allowed)}")
    missing = [key for key in allowed if key not in options and key not in (function.__kwdefaults__ or {})]
    if missing:
        raise ValueError(f"{missing[0]}: missing; the {name} schedule takes {', '.join(allowed)}")
    not_finite = [key for key in options if not math.isfinite(options[key])]
    if not_finite:
        raise ValueError(f"{not_finite[0]}: {options[not_finite[0]]} is not a finite number")
    function(0, **options)
    return lambda iteration: function(iteration, **options)


def _progress(iteration: int, span: float) -> float:
    _check_span("span", span)
    _check_iteration(iteration)
    return min(1.0, iteration / span)


def _check_span(name: str, span: float) -> None:
    if not 0.0 < span < math.inf:
        raise ValueError(f"{name}: {span} is not a positive number of iterations")


def _check_iteration(iteration: int) -> None:
    if iteration < 0:
        raise ValueError(f"iteration: {iteration} is negative")
