"""Tasks drawn by signal: the draw against the formula, uniform draws as ever, classes, bounds, inside a fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gigpo_lightning.callbacks.checkpoint import IterationCheckpoint
from gigpo_lightning.callbacks.curriculum import Curriculum
from gigpo_lightning.curriculum import Stage
from gigpo_lightning.envs.alfworld.tasks import GeneratedTasks
from gigpo_lightning.envs.base import Task
from gigpo_lightning.rollout import task_choice
from gigpo_lightning.rollout.collector import EpisodeJob
from gigpo_lightning.rollout.plan import generator, plan_iteration
from gigpo_lightning.rollout.report import Tally
from gigpo_lightning.rollout.task_choice import (
    ClassCount,
    TaskSignal,
    check_classes,
    class_of,
    count_classes,
    spread_of,
)
from gigpo_lightning.trajectory import EndReason, Episode, Group
from tests.toy_run import fit, rollouts
from tests.toy_world import BoxTasks

SIGNAL = Stage("s", task_choice="signal")


class Kinds(BoxTasks):
    """Tasks of ten types, in turn."""

    def get(self, split: str, index: int) -> Task:
        return Task(f"{split}-{index}", split, {"type": f"k{index % 10}", "steps": 3}, None)


def planned(stage: Stage, signal: TaskSignal | None, tasks: BoxTasks, iterations: int, **options: Any) -> list[Any]:
    plan = partial(plan_iteration, {"s": tasks, "early": tasks}, stage, options.pop("rehearsal", ()))
    settings = {"split": "train", "groups": 8, "members": 2, "seed": 5, "rank": 0} | options
    return [job for k in range(iterations) for job in plan(iteration=k, signal=signal, **settings)]


def groups(*wins: tuple[int, int]) -> list[Group]:
    """Groups by (won, members)."""
    return [
        Group("t", "", tuple(Episode("t", "", (), (), EndReason.TERMINATED, won=i < won) for i in range(n)))
        for won, n in wins
    ]


def test_a_uniform_draw_is_what_it_was_before_there_was_a_choice() -> None:
    """The oracle is the former code: any further random number would move all that follow."""
    early, stage, tasks = Stage("early", max_turns=7), Stage("s", rehearsal=0.4), BoxTasks(size=1000)
    for rank, iteration in ((0, 0), (1, 3)):
        random, wanted = generator(0, 5, rank, iteration), []
        for number in range(8):
            chosen = early if random.random() < 0.4 and random.integers(1) == 0 else stage
            task = tasks.get("train", int(random.integers(1000)))
            seeds = [(1, 5, rank, iteration, number, member) for member in range(2)]
            wanted.append((chosen.name, tuple(EpisodeJob(task, chosen.max_turns, seed) for seed in seeds)))
        options = {"split": "train", "groups": 8, "members": 2, "seed": 5, "rank": rank, "iteration": iteration}
        found = list(plan_iteration({"s": tasks, "early": tasks}, stage, [early], **options))
        assert [(job.stage, job.members) for job in found] == wanted
        assert {job.task_class for job in found} == {""}


def test_tasks_near_one_half_are_drawn_in_proportion_to_what_is_kept() -> None:
    signal = TaskSignal()
    # k0 teaches all that a class can, the others nothing: kept 1 and 1/6; of ten, k0 has 1 / (1 + 9/6) = 0.4 of draws.
    signal.estimates = {f"type=k{i},steps=3": 0.25 if i == 0 else 0.0 for i in range(10)}
    counts = Counter(job.task.difficulty["type"] for job in planned(SIGNAL, signal, Kinds(size=1000), 250))
    share = counts["k0"] / 2000
    assert share == pytest.approx(0.4, abs=4 * (0.4 * 0.6 / 2000) ** 0.5)  # four standard errors
    uniform = Counter(job.task.difficulty["type"] for job in planned(SIGNAL, None, Kinds(size=1000), 250))
    assert uniform["k0"] / 2000 == pytest.approx(0.1, abs=4 * (0.1 * 0.9 / 2000) ** 0.5)


def test_the_draw_follows_from_seed_and_estimates() -> None:
    signal, other = TaskSignal(), TaskSignal()
    signal.update({"type=k1,steps=3": ClassCount(0, 8, 0.0, 9)})
    other.load_state_dict(signal.state_dict())
    one, two = (planned(SIGNAL, s, Kinds(size=1000), 5) for s in (signal, other))
    assert one == two
    assert one != planned(SIGNAL, signal, Kinds(size=1000), 5, seed=6)
    assert one != planned(SIGNAL, TaskSignal(), Kinds(size=1000), 5)


def test_few_tasks_are_told_apart_one_by_one() -> None:
    signal = TaskSignal()
    signal.estimates = {f"task=train-{i}": 0.0 for i in range(1, 10)}
    counts = Counter(job.task.id for job in planned(SIGNAL, signal, BoxTasks(size=10), 100))
    # never played: as if p(1 − p) = 1/4; 0.4 as above
    assert counts["train-0"] / 800 == pytest.approx(0.4, abs=4 * (0.4 * 0.6 / 800) ** 0.5)


def test_rehearsal_stays_uniform_with_its_own_horizon() -> None:
    stage, early = Stage("s", task_choice="signal", rehearsal=0.5, max_turns=9), Stage("early", max_turns=5)
    jobs = planned(stage, TaskSignal(), Kinds(size=1000), 20, rehearsal=[early], turn_limit=6)
    assert {(job.stage, job.members[0].max_turns, job.task_class == "") for job in jobs} == {
        ("s", 6, False),
        ("early", 5, True),
    }


def test_estimates_by_hand() -> None:
    assert [spread_of(k, 4) for k in range(5)] == [0, 3 / 12, 4 / 12, 3 / 12, 0]
    assert spread_of(1, 1) == 0
    counts = count_classes(["a", "b", "", "a"], groups((2, 4), (0, 4), (1, 2), (4, 4)))
    assert counts == {"a": ClassCount(6, 8, 4 / 12, 2), "b": ClassCount(0, 4, 0, 1)}
    signal = TaskSignal()
    signal.update(counts)
    # a: two groups, 0.7² = 0.49 of 1/4 and 0.51 of the mean 1/6; b: 0.7 of 1/4
    assert signal.state_dict() == {"a": pytest.approx(0.49 / 4 + 0.51 / 6), "b": pytest.approx(0.175)}
    assert signal.kept("b") == pytest.approx(0.225 / 0.3)
    assert signal.kept("never played") == 1.0
    signal.estimates["c"] = 0.5  # a group of two that won one has x = 1/2
    assert signal.kept("c") == 1.0


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_the_spread_of_a_group_is_unbiased(p: float) -> None:
    wins = np.random.default_rng(0).binomial(8, p, 20_000)
    assert np.mean([spread_of(int(k), 8) for k in wins]) == pytest.approx(p * (1 - p), abs=0.002)


def test_a_class_whose_tasks_are_all_won_or_all_lost_teaches_nothing() -> None:
    """Its pooled rate is 1/2: an estimate from that would prefer it."""
    signal = TaskSignal()
    for _ in range(20):
        signal.update(count_classes(["a", "a"], groups((8, 8), (0, 8))))
    assert signal.kept("a") == pytest.approx(1 / 6, abs=0.01)


def test_memory_is_bounded_and_forgets_what_was_played_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_choice, "MAX_CLASSES", 3)
    signal = TaskSignal()
    for name in "abcadb":
        signal.update({name: ClassCount(1, 2, 0.5, 1)})
    assert list(signal.estimates) == ["a", "d", "b"]


@pytest.mark.parametrize(
    ("difficulty", "by", "size", "name"),
    [
        ({"type": "a", "steps": 4, "room": "hall"}, None, 1000, "type=a,steps=4"),
        ({"type": "a", "room": "hall"}, None, 1000, "type=a"),
        ({"type": "a", "room": "hall"}, ["room"], 10, "room=hall"),
        ({"type": "a"}, None, 256, "task=id"),
        ({"type": "a"}, None, 257, "type=a"),
        ({"steps": True}, ["steps"], 10, "steps=True"),
        ({"steps": float("inf")}, ["steps"], 10, "steps=inf"),
    ],
)
def test_classes(difficulty: Mapping[str, Any], by: Sequence[str] | None, size: int, name: str) -> None:
    assert class_of(Task("id", "train", difficulty, None), by, size) == name


def test_numbers_above_four_fall_into_two_levels_an_octave() -> None:
    levels = [class_of(Task("", "", {"steps": n}, None), ["steps"], 9).partition("=")[2] for n in range(1, 20)]
    assert levels == [*"1234", *["≈6"] * 2, *["≈8"] * 3, *["≈11"] * 4, *["≈16"] * 6]


def test_generated_alfworld_has_few_classes_a_stage() -> None:
    tasks = GeneratedTasks().narrow({"receptacles": 18})
    classes = Counter(class_of(tasks.get("train", i), None, tasks.len("train")) for i in range(120))
    assert len(classes) < 45  # 16 groups an iteration meet most classes again within three iterations
    assert classes.most_common(1)[0][1] > 3


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (
            Stage("s", task_choice="signal", signal_by=["steps"]),
            r"signal_by: .* no knob `steps` \(knobs: boxes, type\)",
        ),
        (Stage("s", task_choice="signal", signal_by=["boxes", "x"]), "signal_by: .* no knob `x`"),
    ],
)
def test_a_knob_that_the_tasks_lack_is_refused_before_the_first_iteration(
    tmp_path: Path, stage: Stage, message: str
) -> None:
    curriculum = Curriculum(written(tmp_path, stage))
    with pytest.raises(ValueError, match=rf"stage 's', split 'train': {message}"):
        fit(tmp_path, callbacks=[curriculum])


def test_many_tasks_without_type_and_steps_need_signal_by() -> None:
    task = Task("", "", {"level": 1}, None)
    check_classes(Stage("s"), task, 1000)
    check_classes(SIGNAL, task, 10)
    with pytest.raises(ValueError, match=r"needs `signal_by`.*neither `type` nor `steps` \(knobs: level\)"):
        check_classes(SIGNAL, task, 1000)


def written(folder: Path, stage: Stage) -> str:
    by = "" if stage.signal_by is None else f", signal_by: {list(stage.signal_by)}"
    (folder / "c.yaml").write_text(f"stages: [{{name: s, max_turns: 4, task_choice: {stage.task_choice}{by}}}]")
    return str(folder / "c.yaml")


def test_counts_add_up_over_processes_and_odd_names() -> None:
    """Sums travel by name: the tallies of two processes are added entry by entry."""
    one, two, both = Tally(), Tally(), Tally()
    one.add_classes({"type=a.b,x=class.c.groups": ClassCount(1, 2, 0.5, 1)})
    two.add_classes({"type=a.b,x=class.c.groups": ClassCount(1, 2, 0.5, 1), "d\n": ClassCount(0, 2, 0.0, 1)})
    for tally in (one, two):
        for name, value in tally.sums.items():
            both.sums[name] += value
    assert both.classes() == {"type=a.b,x=class.c.groups": ClassCount(2, 4, 1.0, 2), "d\n": ClassCount(0, 2, 0.0, 1)}


def test_in_a_fit_it_learns_the_tasks_and_a_resumed_run_draws_the_same(tmp_path: Path) -> None:
    def callbacks(choice: str) -> list[Any]:
        return [Curriculum(written(tmp_path, Stage("s", task_choice=choice))), IterationCheckpoint()]

    data = {"tasks": BoxTasks(3, size=6)}

    def drawn(name: str, choice: str, *epochs: int) -> tuple[list[str], dict[str, float]]:
        ids: list[str] = []
        for count in epochs:
            own, path = callbacks(choice), "last" if count > epochs[0] else None
            fit(tmp_path / name, count, own, data | {"keep_rollouts": 9}, ckpt_path=path)
        for rows in rollouts(tmp_path / name):
            ids += [row["task_id"] for row in rows]
        return ids, own[0].signal.estimates

    straight, estimates = drawn("a", "signal", 6)
    assert 1 < len(estimates) <= 6
    assert all(name.startswith("task=train-") for name in estimates)
    assert drawn("b", "signal", 3, 6) == (straight, estimates)
    uniform, none = drawn("c", "uniform", 6)
    assert none == {}
    assert uniform != straight
