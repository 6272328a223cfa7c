"""Evaluations: the interval, the fixed plan, and what is counted."""

from __future__ import annotations

from typing import Any

import pytest

from gigpo_lightning.curriculum import Stage
from gigpo_lightning.rollout.evaluation import (
    EvaluationBatch,
    EvaluationRule,
    Outcome,
    outcomes,
    plan,
    results_table,
    summarise,
    wilson_interval,
)
from gigpo_lightning.trajectory import EndReason, Episode, Turn
from tests.toy_world import BoxTasks

STAGE = Stage("boxes", max_turns=7)


@pytest.mark.parametrize(
    ("won", "n", "low", "high"),
    [
        # Newcombe 1998, "Two-sided confidence intervals for the single proportion", Table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        # p = 1/2: centre 1/2, half width z·√(1/(4n) + z²/(4n²)) / (1 + z²/n); with n = 10 and z² = 3.8415 it is 0.2634.
        (5, 10, 0.2366, 0.7634),
        # p = 1: the lower end is n / (n + z²) = 10 / 13.8415.
        (10, 10, 0.7225, 1.0),
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson_interval(won: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(won / max(n, 1), n) == pytest.approx((low, high), abs=5e-5)


def test_the_plan_is_fixed_and_the_first_tasks_of_a_longer_one() -> None:
    tasks, rule = BoxTasks(3), EvaluationRule()
    sampled, greedy = plan(rule, STAGE, tasks, "unseen", 5, 3, greedy=True)
    assert [job.task.id for job in sampled.jobs] == [f"unseen-{i}" for i in range(5) for _ in range(3)]
    assert [job.task.id for job in greedy.jobs] == [f"unseen-{i}" for i in range(5)]
    assert len({job.seed for job in sampled.jobs}) == 15
    assert {job.max_turns for job in sampled.jobs} == {7}
    assert (sampled.temperature, greedy.temperature) == (0.4, 0.0)
    longer = plan(rule, STAGE, tasks, "unseen", 9, 3, greedy=True)
    assert longer[0].jobs[:15] == sampled.jobs
    assert plan(rule, STAGE, tasks, "unseen", 5, 3, greedy=True) == [sampled, greedy]
    other = plan(EvaluationRule(seed=5), STAGE, tasks, "unseen", 5, 3, greedy=False)
    assert {job.seed for job in other[0].jobs}.isdisjoint(job.seed for job in sampled.jobs)


def test_a_plan_has_no_more_tasks_than_there_are_and_no_empty_part() -> None:
    (sampled,) = plan(EvaluationRule(), STAGE, BoxTasks(3, size=4), "seen", 100, 1, greedy=False)
    assert len(sampled.jobs) == 4
    (greedy,) = plan(EvaluationRule(), STAGE, BoxTasks(3), "seen", 2, 0, greedy=True)
    assert greedy.mode == "greedy"


def test_outcomes_count_what_was_played() -> None:
    (batch,) = plan(EvaluationRule(), STAGE, BoxTasks(3), "seen", 2, 1, greedy=False)
    turn = Turn("", "", 0.0, "", valid=True, admissible=True, tokens=1)
    sloppy = Turn("", "", 0.0, "", valid=True, admissible=True, tokens=1, well_formed=False)
    episodes = [
        Episode("seen-0", "", (turn, sloppy, sloppy), (), EndReason.TERMINATED, won=True),
        Episode("seen-1", "", (turn,) * 7, (), EndReason.TRUNCATED, won=False),
    ]
    assert outcomes(batch.jobs, episodes) == [
        Outcome("seen-0", "take", True, 3, ill_formed=2),
        Outcome("seen-1", "take", False, 7),
    ]


def test_summarise_per_type() -> None:
    """Task a (type x) won 2 of 2; b (x) won 0 of 2; c (y) won 1 of 2."""
    played = [
        Outcome("a", "x", True, 2),
        Outcome("a", "x", True, 4, ill_formed=3),
        Outcome("b", "x", False, 9),
        Outcome("b", "x", False, 9),
        Outcome("c", "y", True, 3),
        Outcome("c", "y", False, 9),
    ]
    row = summarise(EvaluationBatch("stage", "seen", "sampled", 0.4, ()), played)
    assert (row["stage"], row["split"], row["mode"], row["temperature"]) == ("stage", "seen", "sampled", 0.4)
    assert (row["tasks"], row["episodes"], row["success"], row["length"]) == (3, 6, 0.5, 6.0)
    # 3 of 2 + 4 + 9 + 9 + 3 + 9 = 36 answers broke their format; those of type x are 24.
    assert row["well_formed"] == pytest.approx(33 / 36)
    assert [kind["well_formed"] for kind in row["types"].values()] == pytest.approx([21 / 24, 1.0])
    # Repeats of a task are not independent: n is 3, not 6.
    assert row["ci95"] == pytest.approx(wilson_interval(0.5, 3))
    assert list(row["types"]) == ["x", "y"]
    assert {k: (v["tasks"], v["episodes"], v["success"]) for k, v in row["types"].items()} == {
        "x": (2, 4, 0.5),
        "y": (1, 2, 0.5),
    }
    # Wilson of 1/2 with n = 3: 0.5 ± 1.96·√(1/12 + 3.8415/36) / (1 + 3.8415/3) = 0.5 ± 0.3747.
    assert results_table([row]) == [("stage", "seen", "sampled", "0.500", "0.125–0.875", "3", "6.0")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": 0}, r"evaluation\.tasks=0: must be at least 1"),
        ({"seeds": 0}, r"evaluation\.seeds=0"),
        ({"during_fit_tasks": 0}, r"evaluation\.during_fit_tasks=0"),
        ({"predict_tasks": 0}, r"evaluation\.predict_tasks=0"),
        ({"temperature": 0.0}, r"evaluation\.temperature=0\.0: must be positive"),
        ({"temperature": float("nan")}, r"evaluation\.temperature=nan"),
        ({"temperature": float("inf")}, r"evaluation\.temperature=inf"),
        ({"seed": -1}, r"evaluation\.seed=-1: must be at least 0"),
        ({"splits": ("seen", "unseen", "seen")}, r"evaluation\.splits: 'seen' is listed twice"),
        ({"stages": ("one", "one")}, r"evaluation\.stages: 'one' is listed twice"),
        ({"splits": ()}, r"evaluation\.splits is empty"),
        ({"stages": ()}, r"evaluation\.stages is empty"),
    ],
)
def test_a_bad_option_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EvaluationRule(**options)


def test_names_are_checked_against_the_curriculum_and_the_task_set() -> None:
    splits = ("train", "seen", "unseen")
    EvaluationRule(stages=("boxes",), predict_stage="boxes").check((STAGE,), splits)
    with pytest.raises(ValueError, match=r"evaluation\.stages: there is no stage 'box'; did you mean 'boxes'\?"):
        EvaluationRule(stages=("box",)).check((STAGE,), splits)
    with pytest.raises(ValueError, match=r"evaluation\.predict_stage: .*\(stages: none, no curriculum runs\)"):
        EvaluationRule(predict_stage="boxes").check((), splits)
    with pytest.raises(ValueError, match=r"no split 'valid' \(splits: train, seen, unseen\)"):
        EvaluationRule(splits=("seen", "valid")).check((STAGE,), splits)
