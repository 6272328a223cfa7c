"""The replay cache: who borrows what, what a borrowed episode counts for, and that a resumed run goes on with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from gigpo_lightning.batch import Minibatch
from gigpo_lightning.callbacks.checkpoint import IterationCheckpoint
from gigpo_lightning.functional.correction import truncated_importance
from gigpo_lightning.rollout.collection import CreditRule
from gigpo_lightning.rollout.episode_state import episodes_from_state, episodes_to_state
from gigpo_lightning.rollout.replay import ReplayCache, ReplayRule
from gigpo_lightning.rollout.transcript import transcript
from gigpo_lightning.trajectory import EndReason, Episode, Group, Segment, Turn
from tests.toy_run import fit, make_data, rollouts, sgd, weights
from tests.toy_world import BoxTasks


def episode(task: str, won: bool, turns: int = 1, anchor: Any = "a", note: str = "") -> Episode:
    turn = Turn("see", f"do {note}", float(won), anchor, True, True, 1)
    return Episode(task, "", (turn,) * turns, (), EndReason.TERMINATED, won)


def group(task: str, *won: bool, turns: int = 1, note: str = "") -> Group:
    return Group(task, "", tuple(episode(task, w, turns, note=note) for w in won))


def alone(own: Any) -> list[Any]:
    """One process has nobody to ask."""
    return [own]


def after(rule: ReplayRule, *iterations: Group) -> ReplayCache:
    """A cache that has seen one group in each of the iterations 0, 1, …"""
    cache = ReplayCache(rule)
    for number, played in enumerate(iterations):
        cache.exchange([played], number)
        cache.end_iteration(number, alone)
    return cache


# -- lending -----------------------------------------------------------------------------------------------------------


def test_a_group_without_a_success_borrows_the_last_one_of_its_task() -> None:
    cache = after(ReplayRule(), group("x", False, True, note="old"), group("x", True, note="new"), group("y", True))
    failed, other, fine = cache.exchange([group("x", False, False), group("z", False), group("x", True, False)], 4)
    assert [e.won for e in failed.episodes] == [False, False, True]
    assert failed.episodes[2].age == 3 and failed.episodes[2].turns[0].action == "do new"
    assert other == group("z", False) and fine == group("x", True, False)


def test_a_success_is_lent_from_the_next_iteration_on() -> None:
    cache = ReplayCache(ReplayRule())
    groups = [group("x", True), group("x", False)]
    assert cache.exchange(groups, 0) == groups
    cache.end_iteration(0, alone)
    (found,) = cache.exchange([group("x", False)], 1)
    assert found.episodes[1].age == 1


def test_of_an_iteration_the_shortest_success_stays() -> None:
    cache = ReplayCache(ReplayRule())
    for turns in (3, 2, 4):
        cache.exchange([group("x", True, turns=turns)], 0)
    cache.end_iteration(0, alone)
    assert len(cache.exchange([group("x", False)], 1)[0].episodes[1].turns) == 2


@pytest.mark.parametrize(("max_age", "iteration", "lends"), [(2, 2, True), (2, 3, False), (3, 3, True)])
def test_an_old_success_is_not_lent(max_age: int, iteration: int, lends: bool) -> None:
    cache = after(ReplayRule(max_age=max_age), group("x", True))
    assert (len(cache.exchange([group("x", False)], iteration)[0].episodes) == 2) == lends
    for number in range(1, 4):
        cache.end_iteration(number, alone)
        assert len(cache) == (number + 1 <= max_age)  # what may no longer be lent is not kept


def test_the_latest_tasks_stay() -> None:
    tasks = ["a", "b", "c", "a"]
    cache = after(ReplayRule(max_episodes=2), *(group(task, True) for task in tasks))
    lent = {t: len(cache.exchange([group(t, False)], 4)[0].episodes) == 2 for t in "abc"}
    assert lent == {"a": True, "b": False, "c": True} and len(cache) == 2
    many = ReplayCache(ReplayRule(max_episodes=2))
    many.exchange([group(task, True) for task in "abcde"], 0)  # bounded while the iteration is under way, too
    assert len(many._new) == 2
    assert many.end_iteration(0, alone)["replay/cache_size"] == 2


def test_figures_by_hand() -> None:
    cache = after(ReplayRule(), group("x", True, False), group("y", True))
    cache.exchange([group("x", False, False, False)], 2)
    cache.exchange([group("y", False), group("z", False, False)], 2)
    # Played: 6 episodes; borrowed: 2, of 2 and 1 iterations ago.
    expected = {"replay/share": 2 / 8, "replay/age": 1.5, "replay/cache_size": 2.0}
    assert cache.end_iteration(2, alone) == expected
    assert cache.end_iteration(3, alone) == {"replay/share": 0.0, "replay/cache_size": 2.0}


def test_all_processes_keep_the_same_episodes() -> None:
    caches = [ReplayCache(ReplayRule()), ReplayCache(ReplayRule())]
    caches[0].exchange([group("x", True, note="first"), group("y", True)], 0)
    caches[1].exchange([group("x", True, note="second"), group("z", True, False)], 0)
    parts = [(cache._new, cache._ages, cache._episodes) for cache in caches]
    figures = [cache.end_iteration(0, lambda own: parts) for cache in caches]
    assert figures[0] == figures[1] and caches[0]._played == caches[1]._played
    assert list(caches[0]._played) == ["y", "x", "z"]
    assert caches[0]._played["x"][1].turns[0].action == "do second"


def test_off_keeps_and_says_nothing() -> None:
    cache = ReplayCache(None)
    cache.exchange([group("x", True)], 0)
    assert cache.end_iteration(0, alone) == {} and len(cache) == 0
    assert cache.exchange([group("x", False)], 1) == [group("x", False)]
    cache.load_state_dict(after(ReplayRule(), group("x", True)).state_dict())
    assert len(cache) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_episodes": 0}, "data.replay.max_episodes=0: must be at least 1; replay=null is off"),
        ({"max_age": 0}, "data.replay.max_age=0"),
        ({"max_ratio": 0.5}, "data.replay.max_ratio=0.5: must be at least 1"),
        ({"max_ratio": float("nan")}, "data.replay.max_ratio=nan"),
    ],
)
def test_a_bad_option_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReplayRule(**options)


def test_a_critic_has_no_use_for_it() -> None:
    with pytest.raises(ValueError, match=r"data\.replay: data\.credit\.estimator=ppo compares with a critic"):
        make_data(replay=ReplayRule(), credit=CreditRule(estimator="ppo"))


def test_a_transcript_says_that_it_is_borrowed() -> None:
    cache = after(ReplayRule(), group("x", True))
    (found,) = cache.exchange([group("x", False)], 3)
    assert transcript(found.episodes[1]).endswith("[won, terminated, 1 turns, borrowed from 3 iterations ago]")
    assert transcript(found.episodes[0]).endswith("[not won, terminated, 1 turns]")


# -- state -------------------------------------------------------------------------------------------------------------


def test_episodes_survive_a_checkpoint_to_the_bit(tmp_path: Path) -> None:
    turns = (
        Turn("you see a 'box' .\n\\", 'open "it"', 0.1, ("held", None, 3, (1.5,)), True, False, 3),
        Turn("é λ", "", -0.0, "b", False, True, 0, False, "<think>\n</think>"),
    )
    odd = np.float32(-0.3).item()
    segments = (
        Segment([5, 6, 7], [False, True, True], [-1, 0, 0], [0.0, odd, -1e-30], [6, 8], [2, 0], [1]),
        Segment([9], [False], [-1], [0.0], [], [], [1]),
    )
    episodes = [
        Episode("t", "do", turns, segments, EndReason.CONTEXT_LIMIT, True, 2),
        Episode("u", "", turns[:1], segments[1:], EndReason.TERMINATED, False),
    ]
    torch.save(episodes_to_state(episodes), tmp_path / "state")
    assert episodes_from_state(torch.load(tmp_path / "state", weights_only=True)) == episodes
    torch.save(episodes_to_state([]), tmp_path / "empty")
    assert episodes_from_state(torch.load(tmp_path / "empty", weights_only=True)) == []


def test_a_key_that_no_checkpoint_can_hold_is_refused() -> None:
    class Key:
        pass

    won = Group("x", "", (episode("x", True, anchor=Key()),))
    with pytest.raises(ValueError, match=r"data\.replay: the world's anchor keys are of type Key"):
        ReplayCache(ReplayRule()).exchange([won], 0)


# -- fits --------------------------------------------------------------------------------------------------------------

# Two tasks of eight boxes and two members: many groups have no success, and their task had one before.
WORLD = {"tasks": BoxTasks(8, size=2), "groups": 4, "members": 2, "max_turns": 3, "minibatches": 1}
FAST = {"optimizer": sgd, "gradient_clip": 0.1}  # steps that move the policy from iteration to iteration
EPOCHS = 7


class Figures(pl.Callback):
    """The figures of every iteration, and the tokens of its first minibatch with what is corrected in them."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []
        self.batches: list[Minibatch] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Minibatch, batch_idx: int) -> None:
        if batch_idx == 0:
            self.batches.append(Minibatch(tuple(batch.micro_batches), batch.temperature))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        figures = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.seen.append({**figures, **trainer.datamodule.report.metrics})  # type: ignore[attr-defined]


def run(
    root: Path, epochs: int = EPOCHS, replay: ReplayRule | None = None, **options: Any
) -> tuple[Figures, torch.Tensor]:
    figures = Figures()
    data = {**WORLD, "replay": replay, "keep_rollouts": 9, **options}
    _, module, _ = fit(root, epochs, [figures], data, FAST)
    return figures, weights(module)


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Figures, torch.Tensor]:
    root = tmp_path_factory.mktemp("replayed")
    return root, *run(root, replay=ReplayRule(max_ratio=1.2))


def test_borrowed_episodes_are_credited_but_not_counted(replayed: tuple[Path, Figures, torch.Tensor]) -> None:
    root, figures, _ = replayed
    files = rollouts(root)
    assert sum(seen["replay/share"] > 0 for seen in figures.seen) >= 2
    for iteration, (rows, seen) in enumerate(zip(files, figures.seen, strict=True)):
        own, old = [row for row in rows if not row["age"]], [row for row in rows if row["age"]]
        assert len(own) == 8
        assert seen["replay/share"] == len(old) / len(rows)
        assert seen["rollout/success"] == sum(row["won"] for row in own) / 8
        assert seen.get("replay/age") == (np.mean([row["age"] for row in old]) if old else None)
        assert ("replay/ratio_mean" in seen) == ("replay/truncated_frac" in seen) == bool(old)
        for row in old:
            members = [other for other in own if other["group"] == row["group"]]
            assert len(members) == 2 and not any(other["won"] for other in members)
            assert row["won"] and min(row["episode_advantage"]) > 0 > max(members[0]["episode_advantage"])
            # The very row of an earlier file.
            origin = files[iteration - row["age"]]
            same = [o for o in origin if o["token_ids"] == row["token_ids"] and o["task_id"] == row["task_id"]]
            assert same and same[0]["won"] and any(o["logprobs"] == row["logprobs"] for o in same)


def test_the_library_does_not_see_a_turn_twice(replayed: tuple[Path, Figures, torch.Tensor], tmp_path: Path) -> None:
    _, _, data = fit(tmp_path, EPOCHS, [], {**WORLD, "replay": ReplayRule(max_ratio=1.2), "keep_rollouts": 9}, FAST)
    rows = rollouts(tmp_path)[-1]
    turns = sum(len(table.anchors) for table in data.report.credit_tables())
    assert turns == sum(len(row["anchor"]) for row in rows if not row["age"])


def test_borrowed_tokens_have_the_present_log_probs_and_truncated_weights(
    replayed: tuple[Path, Figures, torch.Tensor],
) -> None:
    root, figures, _ = replayed
    files = rollouts(root)
    for seen in figures.seen:
        assert seen["loss/mismatch"] < 1e-5  # old and new log-probs of the first update are the same policy's
    checked = 0
    for rows, batch, seen in zip(files, figures.batches, figures.seen, strict=True):
        ratios, recorded = [], {(tuple(r["token_ids"]), bool(r["age"])): r for r in rows}
        for micro in batch.micro_batches:
            if micro.importance is None:
                assert not any(row["age"] for row in rows)
                continue
            ends = torch.tensor(micro.lengths).cumsum(0)
            owner = torch.bucketize(micro.chosen, ends, right=True)
            for number, ids in enumerate(micro.token_ids.split(micro.lengths)):
                mine = owner == number
                weights_, present = micro.importance[mine], micro.old_logprobs[mine]
                if (tuple(ids.tolist()), True) not in recorded:
                    assert (weights_ == 1).all()
                    continue
                if (tuple(ids.tolist()), False) in recorded:
                    continue  # the same words were said anew
                row = recorded[tuple(ids.tolist()), True]
                old = torch.tensor([p for p, m in zip(row["logprobs"], row["response_mask"], strict=True) if m])
                expected = truncated_importance(present, old, cap=1.2)
                torch.testing.assert_close(weights_, expected.weights)
                ratios += (present - old).exp().tolist()
                checked += 1
        if ratios and len(ratios) == sum(sum(r["response_mask"]) for r in rows if r["age"]):
            assert seen["replay/ratio_mean"] == pytest.approx(np.mean(ratios), rel=1e-4)
            assert seen["replay/truncated_frac"] == pytest.approx(np.mean(np.array(ratios) > 1.2))
    assert checked >= 2


def test_every_option_changes_the_run(replayed: tuple[Path, Figures, torch.Tensor], tmp_path: Path) -> None:
    _, _, usual = replayed
    rules = {"off": None, "episodes": (1, 10, 1.2), "age": (256, 1, 1.2), "ratio": (256, 10, 1.0)}
    for name, rule in rules.items():
        _, other = run(tmp_path / name, replay=ReplayRule(*rule) if rule else None)
        assert not other.equal(usual), name
    _, again = run(tmp_path / "again", replay=ReplayRule(max_ratio=1.2))
    assert again.equal(usual)


def test_resume_equals_uninterrupted(replayed: tuple[Path, Figures, torch.Tensor], tmp_path: Path) -> None:
    root, figures, usual = replayed
    data = {**WORLD, "replay": ReplayRule(max_ratio=1.2), "keep_rollouts": 9}
    fit(tmp_path, 3, [IterationCheckpoint()], data, FAST)
    later = Figures()
    last = str(tmp_path / "checkpoints" / "last.ckpt")
    _, module, _ = fit(tmp_path, EPOCHS, [later, IterationCheckpoint()], data, FAST, ckpt_path=last)
    assert sum(seen["replay/share"] for seen in later.seen) > 0
    assert [s["replay/share"] for s in later.seen] == [s["replay/share"] for s in figures.seen[3:]]
    assert weights(module).equal(usual)
    assert rollouts(tmp_path)[-1] == rollouts(root)[-1]
