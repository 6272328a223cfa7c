"""An iteration in parts: whatever number of groups is credited at a time, the file and the figures are the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gigpo_lightning.credit import Credit
from gigpo_lightning.curriculum import Stage
from gigpo_lightning.policy.scratch import ScratchPolicy
from gigpo_lightning.rollout.collection import CreditRule
from gigpo_lightning.rollout.collector import Collector, CollectorStats, EpisodeJob
from gigpo_lightning.rollout.context import SegmentRule
from gigpo_lightning.rollout.crediting import Crediting
from gigpo_lightning.rollout.iteration import Controls, IterationSpec, played_groups, run_iteration
from gigpo_lightning.rollout.plan import GroupJob
from gigpo_lightning.rollout.player import Player, PlayRule
from gigpo_lightning.rollout.pool import InProcessPool
from gigpo_lightning.rollout.replay import ReplayCache
from gigpo_lightning.rollout.report import RolloutReport
from gigpo_lightning.rollout.sampler import Sampler
from gigpo_lightning.rollout.store import RolloutStore
from gigpo_lightning.trajectory import EndReason, Episode, Group
from tests.toy_run import make_policy
from tests.toy_world import BoxEnv, BoxTasks

GROUPS, MEMBERS = 7, 3
STAGES = {"two": Stage(name="two", max_turns=4), "three": Stage(name="three", max_turns=5, rehearsal=0.5)}
TASKS = {"two": BoxTasks(2), "three": BoxTasks(3, size=3)}  # three tasks only: some come twice in an iteration
# Sums in another order: two terms of like size, 15 digits each.
ROUNDED = {"credit/episode_advantage_std", "credit/step_advantage_std"}


@pytest.fixture(scope="module")
def policy() -> ScratchPolicy:
    made = make_policy()
    made.prepare(BoxTasks(3))
    return made.eval()


def run(
    policy: ScratchPolicy, path: Path, credited_episodes: int, parts: list[int] | None = None
) -> tuple[RolloutStore, RolloutReport]:
    """One iteration of two stages; `parts` receives the number of groups that were credited at a time."""
    collector = Collector(policy, InProcessPool(BoxEnv), SegmentRule(turns=2, max_tokens=200), rows=5)

    def play(jobs: Iterable[EpisodeJob], temperature: float) -> list[Episode]:
        return [episode for _, episode in sorted(collector.run(jobs, temperature))]

    class Counting(CreditRule):
        def credit(self, groups: Sequence[Group], *args: Any, **options: Any) -> Credit:
            if parts is not None:
                parts.append(len(groups))
            return super().credit(groups, *args, **options)

    crediting = Crediting(Counting(), 100).of_iteration(policy, 0.8, None, 0)
    spec = IterationSpec(0, GROUPS, MEMBERS, 0, 0, 1, transcripts=5, credited_episodes=credited_episodes)
    controls = Controls(temperature=1.5, rehearsal=(STAGES["two"],))
    return run_iteration(
        spec,
        controls,
        STAGES["three"],
        lambda s: TASKS[s.name],
        play,
        CollectorStats,
        crediting,
        ReplayCache(None),
        path,
    )


@pytest.mark.parametrize(
    ("credited_episodes", "parts"), [(1, [1] * 7), (MEMBERS * 3, [3, 3, 1]), (MEMBERS * 3 + 2, [3, 3, 1])]
)
def test_parts_change_nothing(policy: ScratchPolicy, tmp_path: Path, credited_episodes: int, parts: list[int]) -> None:
    credited: list[int] = []
    store, report = run(policy, tmp_path / "parts.arrow", credited_episodes, credited)
    whole, expected = run(policy, tmp_path / "whole.arrow", 10**6)
    assert credited == parts
    rows = whole.table.to_pylist()
    assert store.table.to_pylist() == rows  # to the bit, numbers of step groups included
    assert {row["stage"] for row in rows} == {"two", "three"}
    for name in ("token_counts", "chosen_counts", "teaches"):
        assert getattr(store, name).tolist() == getattr(whole, name).tolist(), name
    numbers = [5, 0, len(rows) - 1, len(rows) // 2]
    mine, theirs = store.micro_batch(numbers), whole.micro_batch(numbers)
    assert mine.lengths == theirs.lengths
    for name in ("token_ids", "chosen", "turn", "old_logprobs", "advantages", "allowed_ids", "allowed_counts"):
        assert getattr(mine, name).equal(getattr(theirs, name)), name
    assert report.transcripts == expected.transcripts and len(report.transcripts) == 5
    sizes = "anchors/step_group_sizes"
    assert report.histograms[sizes].tolist() == expected.histograms[sizes].tolist()
    assert report.success == expected.success
    for name, value in expected.metrics.items():
        if not name.startswith("time/"):
            assert report.metrics[name] == (pytest.approx(value, rel=1e-12) if name in ROUNDED else value), name
    assert 0 < expected.metrics["anchors/density"] < 1 and 0 < expected.metrics["credit/zero_spread_groups"] < 1


def test_the_figures_are_over_all_turns_not_means_of_parts(policy: ScratchPolicy, tmp_path: Path) -> None:
    store, report = run(policy, tmp_path / "parts.arrow", 1)
    step_groups = np.concatenate(store.table.column("step_group").to_pylist())
    advantages = np.concatenate(store.table.column("step_advantage").to_pylist())
    _, sizes = np.unique(step_groups, return_counts=True)
    assert report.metrics["anchors/density"] == (sizes > 1).sum() / len(sizes)
    assert report.metrics["anchors/coverage"] == sizes[sizes > 1].sum() / sizes.sum()
    assert report.metrics["credit/step_advantage_std"] == pytest.approx(advantages.std())


def test_the_library_reads_every_turn(policy: ScratchPolicy, tmp_path: Path) -> None:
    store, report = run(policy, tmp_path / "parts.arrow", MEMBERS)
    rows, tables = store.table.to_pylist(), list(report.credit_tables())
    assert len(tables) == GROUPS
    for name in ("tasks", "anchors", "texts", "stages", "step_returns"):
        found = [value for table in tables for value in getattr(table, name)]
        column = {"anchors": "anchor", "texts": "observation", "step_returns": "step_return"}.get(name)
        turns = [(row, i) for row in rows for i in range(len(row["anchor"]))]
        of_row = {"tasks": "task_id", "stages": "stage"}.get(name, "")
        assert found == [row[column][i] if column else row[of_row] for row, i in turns], name
    assert len(list(report.credit_tables())) == GROUPS  # as often as one asks


# -- order and waiting -------------------------------------------------------------------------------------------------


def episode(name: str) -> Episode:
    return Episode(name, "", (), (), EndReason.TRUNCATED, False)


def test_groups_come_when_complete_and_all_episodes_are_asked_for() -> None:
    jobs = [EpisodeJob(TASKS["two"].get("train", g), 4, (g, m)) for g in range(2) for m in range(2)]
    asked: list[str] = []

    def play() -> Iterator[Episode]:
        for name in "abcd":
            asked.append(name)
            yield episode(name)
        asked.append("end")  # where an engine ends its collection

    plan = [GroupJob(jobs[2 * g].task, "two", tuple(jobs[2 * g :][:2])) for g in range(2)]
    groups = played_groups(iter(plan), play())
    assert [e.task_id for e in next(groups).episodes] == ["a", "b"]
    assert asked == ["a", "b"]
    assert [e.task_id for e in next(groups).episodes] == ["c", "d"]
    assert list(groups) == [] and asked[-1] == "end"


def test_episodes_come_in_order_while_later_ones_go_on(policy: ScratchPolicy) -> None:
    rule = PlayRule(SegmentRule(max_tokens=200), 4, True, 16, 16, 0, 60.0)
    player = Player(BoxTasks(3), rule, Sampler(None))
    jobs = [EpisodeJob(BoxTasks(3).get("train", i), 6, (i,)) for i in range(24)]
    ahead, order = [], []
    for played in player.play(policy, jobs, 1.5):
        order.append(played.task_id)
        ahead.append(player.stats.steps)
    assert order == [job.task.id for job in jobs]
    assert ahead[0] < ahead[11] < ahead[-1]  # the first came before the last had begun


def test_no_more_wait_than_are_needed_for_order(policy: ScratchPolicy) -> None:
    """What is kept does not grow with the number of episodes: the queue goes on only as rows become free."""

    class Counted(Collector):
        done = 0

        def run(self, jobs: Iterable[EpisodeJob], temperature: float) -> Iterator[tuple[int, Episode]]:
            for item in super().run(jobs, temperature):
                self.done += 1
                yield item

    collector = Counted(policy, InProcessPool(BoxEnv), SegmentRule(max_tokens=200), rows=4)
    player = Player(BoxTasks(3), PlayRule(SegmentRule(max_tokens=200), 4, True, 16, 16, 0, 60.0), Sampler(None))
    player._collector = collector
    jobs = [EpisodeJob(BoxTasks(3).get("train", i), 6, (i,)) for i in range(60)]
    kept = [collector.done - number - 1 for number, _ in enumerate(player.play(policy, jobs, 1.5))]
    # While the slowest of 4 rows plays its 6 turns, the 3 others end at most 3 · 6 / 2 episodes of 2 turns.
    assert 0 < max(kept) <= 9
