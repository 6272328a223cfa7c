"""Rollouts on disk and back: rows, credit per turn, packing; nothing left behind when writing fails."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from gigpo_lightning.batch import PackRow, cut_by_tokens, pack
from gigpo_lightning.policy.scratch import ScratchPolicy
from gigpo_lightning.rollout.collection import CreditRule
from gigpo_lightning.rollout.collector import Collector, EpisodeJob
from gigpo_lightning.rollout.context import SegmentRule
from gigpo_lightning.rollout.demonstrations import pack_row
from gigpo_lightning.rollout.pool import InProcessPool
from gigpo_lightning.rollout.store import RolloutStore, RolloutWriter
from gigpo_lightning.trajectory import Group
from tests.toy_world import BoxEnv, BoxTasks

TASKS = BoxTasks(4)


@pytest.fixture(scope="module")
def policy() -> ScratchPolicy:
    made = ScratchPolicy(hidden_size=32, layers=1, initializer_range=0.2)
    made.prepare(TASKS)
    return made.eval()


def play_groups(policy: ScratchPolicy, turns: int | None, groups: int = 3, members: int = 4) -> list[Group]:
    collector = Collector(policy, InProcessPool(BoxEnv), SegmentRule(turns=turns, max_tokens=200), rows=8)
    jobs = [EpisodeJob(TASKS.get("train", g), 4, (g, m)) for g in range(groups) for m in range(members)]
    episodes = dict(collector.run(jobs, 3.0))  # hot: all kinds of episodes, whatever the initial weights
    return [
        Group(f"train-{g}", "take", tuple(episodes[g * members + m] for m in range(members))) for g in range(groups)
    ]


@pytest.mark.parametrize("turns", [1, 2, None])
def test_every_chosen_token_carries_its_own_turns_advantage(
    policy: ScratchPolicy, tmp_path: Path, turns: int | None
) -> None:
    groups = play_groups(policy, turns)
    credit = CreditRule().credit(groups, 0.8)
    path = tmp_path / "rollouts.arrow"
    with RolloutWriter(path) as writer:
        writer.write(groups, ["first"] * 3, credit)
    store = RolloutStore(path)
    batch = store.micro_batch(range(len(store)))
    # By hand: walk the episodes and look each chosen token's turn up in the flat credit.
    expected, logprobs, offset = [], [], 0
    for group in groups:
        for episode in group.episodes:
            for segment in episode.segments:
                for i, chosen in enumerate(segment.response_mask):
                    if chosen:
                        expected.append(float(credit.advantage[offset + segment.turn_index[i]]))
                        logprobs.append(segment.logprobs[i])
            offset += len(episode.turns)
    assert batch.advantages.tolist() == pytest.approx(expected)
    assert len(set(expected)) > 5
    assert batch.old_logprobs.tolist() == pytest.approx(logprobs)
    assert batch.token_ids.tolist() == [t for g in groups for e in g.episodes for s in e.segments for t in s.token_ids]
    assert store.token_counts.tolist() == list(batch.lengths)
    assert store.chosen_counts.sum() == len(expected)


def test_the_file_is_readable_as_a_stream_and_by_turn(policy: ScratchPolicy, tmp_path: Path) -> None:
    groups = play_groups(policy, None)
    credit = CreditRule().credit(groups, 0.8)
    path = tmp_path / "rollouts.arrow"
    with RolloutWriter(path) as writer:
        for i, group in enumerate(groups):  # written group by group, as a long iteration is
            part = CreditRule().credit([group], 0.8)
            writer.write([group], [f"stage {i}"], part)
    with pa.OSFile(str(path)) as source:
        table = pa.ipc.open_stream(source).read_all()
    assert table.column("group").to_pylist() == [0] * 4 + [1] * 4 + [2] * 4
    assert table.column("episode").to_pylist() == list(range(12))
    flat = [a for row in table.column("advantage").to_pylist() for a in row]
    assert flat == pytest.approx(credit.advantage.tolist())
    actions = [t.action for g in groups for e in g.episodes for t in e.turns]
    assert [a for row in table.column("action").to_pylist() for a in row] == actions
    assert RolloutStore(path).micro_batch([5]).token_ids.tolist() == table.column("token_ids")[5].as_py()


def test_a_failed_write_leaves_nothing(policy: ScratchPolicy, tmp_path: Path) -> None:
    groups = play_groups(policy, None)

    def write_and_fail() -> None:
        with RolloutWriter(tmp_path / "rollouts.arrow") as writer:
            writer.write(groups, ["a"] * 3, CreditRule().credit(groups, 0.8))
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        write_and_fail()
    assert list(tmp_path.iterdir()) == []


def test_pack_by_hand() -> None:
    rows = [
        PackRow(
            *(
                np.array(x)
                for x in (
                    [5, 6, 7],
                    [False, True, True],
                    [-1, 0, 1],
                    [0, -0.5, -0.7],
                    [6, 8, 7, 9],
                    [2, 2],
                    [1.0, -2.0],
                )
            )
        ),
        PackRow(*(np.array(x) for x in ([5, 9], [False, True], [-1, 0], [0, -0.1], [9, 4, 3], [3], [0.5]))),
    ]
    batch = pack(rows)
    assert batch.token_ids.tolist() == [5, 6, 7, 5, 9]
    assert batch.chosen.tolist() == [1, 2, 4]
    assert batch.turn.tolist() == [0, 1, 2]  # the second row's first turn comes after the first row's two
    assert batch.advantages.tolist() == [1.0, -2.0, 0.5]
    assert batch.old_logprobs.tolist() == pytest.approx([-0.5, -0.7, -0.1])
    assert batch.allowed_counts is not None and batch.allowed_counts.tolist() == [2, 2, 3]


def test_rows_may_mix_constrained_and_free_choices() -> None:
    constrained = PackRow(*(np.array(x) for x in ([5, 9], [False, True], [-1, 0], [0, -0.1], [9, 4], [2], [0.5])))
    free = constrained._replace(allowed_ids=np.zeros(0, np.int64), allowed_counts=np.array([0]))
    assert pack([free, free]).allowed_counts is None
    mixed = pack([free, constrained, free])
    assert mixed.allowed_counts is not None and mixed.allowed_counts.tolist() == [0, 2, 0]
    assert mixed.allowed_ids.tolist() == [9, 4]


def test_the_file_keeps_what_was_judged_of_each_answer(policy: ScratchPolicy, tmp_path: Path) -> None:
    (group,) = play_groups(policy, None, groups=1, members=2)
    first, other = group.episodes
    turns = (replace(first.turns[0], well_formed=False, admissible=False, valid=False), *first.turns[1:])
    group = replace(group, episodes=(replace(first, turns=turns), other))
    with RolloutWriter(tmp_path / "rollouts.arrow") as writer:
        writer.write([group], ["a"], CreditRule().credit([group], 0.8))
    table = RolloutStore(tmp_path / "rollouts.arrow").table
    for name in ("valid", "admissible", "well_formed"):
        rest = [True] * (len(turns) - 1 + len(other.turns))
        assert [x for row in table.column(name).to_pylist() for x in row] == [False, *rest]


def test_cut_by_tokens_keeps_every_row_and_the_budget() -> None:
    lengths = [7, 3, 12, 5, 5, 40, 1]
    parts = cut_by_tokens(lengths, 20)
    assert sorted(i for part in parts for i in part) == list(range(7))
    for part in parts:
        assert len(part) * max(lengths[i] for i in part) <= 20 or len(part) == 1


def test_packed_rows_do_not_see_each_other(policy: ScratchPolicy) -> None:
    rows = [pack_row(s, 0.0) for g in play_groups(policy, None) for e in g.episodes for s in e.segments]
    with torch.no_grad():
        together = policy.chosen_logprobs(pack(rows), 1.0)[0]
        alone = torch.cat([policy.chosen_logprobs(pack([row]), 1.0)[0] for row in rows])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
