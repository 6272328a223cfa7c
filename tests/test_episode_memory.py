"""Peak memory of an iteration and of its update: the same for 64 episodes and for 1,024.

Counted are the objects of Python and numpy (tracemalloc) and what Arrow allocates; pages of the mapped file are
neither. `benchmarks/episode_memory.py` measures whole processes.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from torch import nn

from gigpo_lightning.curriculum import Stage
from gigpo_lightning.rollout.collection import CreditRule
from gigpo_lightning.rollout.collector import CollectorStats, EpisodeJob
from gigpo_lightning.rollout.crediting import Crediting
from gigpo_lightning.rollout.iteration import Controls, IterationSpec, run_iteration
from gigpo_lightning.rollout.minibatches import minibatches_of
from gigpo_lightning.rollout.replay import ReplayCache, ReplayRule
from gigpo_lightning.trajectory import EndReason, Episode, Segment, Turn
from tests.toy_world import BoxTasks

MEMBERS, TOKENS, PART = 4, 1000, 16
FEW, MANY = 64, 1024  # episodes


def played(jobs: Iterable[EpisodeJob], temperature: float) -> Iterator[Episode]:
    """Episodes of one turn and 1,000 tokens, every other one chosen; two of a group's four succeed."""
    for job in jobs:
        won = job.seed[-1] % 2 == 0
        mask = [True, False] * (TOKENS // 2)
        segment = Segment(list(range(TOKENS)), mask, [0] * TOKENS, [-0.5] * TOKENS, [], [0] * (TOKENS // 2), [0])
        turn = Turn("you see", "look", float(won), "start", True, True, TOKENS // 2)
        yield Episode(job.task.id, "", (turn,), (segment,), EndReason.TERMINATED, won)


def peaks(episodes: int, path: Path) -> dict[str, int]:
    """The most bytes that were held at once beyond those before, in the collection and in the update."""
    spec = IterationSpec(0, episodes // MEMBERS, MEMBERS, 0, 0, 1, transcripts=1, credited_episodes=PART)
    tasks, stage = BoxTasks(3, size=10**6), Stage(name="all", max_turns=4)
    crediting = Crediting(CreditRule(), 100).of_iteration(nn.Module(), 0.8, None, 0)  # type: ignore[arg-type]
    replay = ReplayCache(ReplayRule(max_episodes=8))
    options: dict[str, Any] = {"passes": 1, "minibatches": 2, "max_tokens": 8 * TOKENS, "temperature": 1.0}
    found = {}
    tracemalloc.start()
    try:
        before, arrow = tracemalloc.get_traced_memory()[0], pa.total_allocated_bytes()
        store, report = run_iteration(
            spec, Controls(), stage, lambda _: tasks, played, CollectorStats, crediting, replay, path
        )
        found["collection"] = tracemalloc.get_traced_memory()[1] - before
        found["arrow"] = pa.total_allocated_bytes() - arrow
        tracemalloc.reset_peak()
        tokens = 0
        for minibatch in minibatches_of(store, **options, seed=0, rank=0, iteration=0):
            tokens += sum(len(micro.token_ids) for micro in minibatch.to("cpu").micro_batches)
        assert tokens == episodes * TOKENS and report.metrics["rollout/success"] == 0.5
        found["update"] = tracemalloc.get_traced_memory()[1] - before
        for table in report.credit_tables():
            assert len(table.anchors) == PART
        found["library"] = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    return found


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, int], dict[str, int]]:
    folder = tmp_path_factory.mktemp("memory")
    peaks(FEW, folder / "first.arrow")  # what is made once is there afterwards
    return peaks(FEW, folder / "few.arrow"), peaks(MANY, folder / "many.arrow")


@pytest.mark.parametrize("phase", ["collection", "update", "library"])
def test_it_does_not_grow_with_the_episodes(measured: tuple[dict[str, int], dict[str, int]], phase: str) -> None:
    few, many = measured
    # Some 200 bytes per row remain: its number, its tokens, its step group. The row itself is 40 KB.
    assert many[phase] - few[phase] < (MANY - FEW) * 400
    assert few[phase] > 8 * TOKENS * 8  # a micro-batch at least: what is measured is there


def test_the_file_is_not_copied(measured: tuple[dict[str, int], dict[str, int]]) -> None:
    assert measured[1]["arrow"] < 20_000
