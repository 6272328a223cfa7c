"""The anchor library as a baseline: the credit by hand, refusals, and every option of the library felt in training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.library_baseline import replay
from gigpo_lightning.callbacks.anchor_library import AnchorLibrary
from gigpo_lightning.callbacks.anchor_table import AnchorTable
from gigpo_lightning.callbacks.checkpoint import IterationCheckpoint
from gigpo_lightning.callbacks.warm_start import WarmStart
from gigpo_lightning.rollout.collection import CreditRule
from gigpo_lightning.rollout.library_baseline import KnownReturns
from tests.test_credit import make_group
from tests.toy_run import fit, rollouts
from tests.toy_world import BoxTasks

LIBRARY = {"credit": CreditRule(singleton_baseline="library"), "keep_rollouts": 99}
FRAC = "anchors/library_baseline_frac"

# "s" has two members; "a" and "b" are alone; the action in "b" was invalid.
GROUP = make_group("x", [[("s", 0.0, True), ("a", 1.0, True)], [("s", 0.0, True), ("b", 0.0, False)]])


class Known:
    """A library that knows of a: n = 4, μ = 0.5, σ = 0.5, and of b: n = 9, μ = 0.25, σ = 0.5."""

    def look_up(self, task_ids: Sequence[str], anchors: Sequence[str], texts: Sequence[str]) -> KnownReturns:
        assert (set(task_ids), set(texts)) == ({"x"}, {"o"})
        n = {"s": 9, "a": 4, "b": 9}
        mean = {"s": 0.0, "a": 0.5, "b": 0.25}
        return KnownReturns(
            np.array([n[a] for a in anchors]), np.array([mean[a] for a in anchors]), np.full(len(anchors), 0.25)
        )


@pytest.mark.parametrize(
    ("options", "lam", "share"),
    [
        ({}, 0.8, 0.2),  # 1 − λ
        ({"combine": "additive", "omega": 0.7}, 0.8, 0.7),  # ω
        ({"estimator": "step"}, 0.8, 1.0),
        ({"estimator": "step", "combine": "additive", "omega": 0.7}, 0.8, 1.0),
    ],
)
def test_credit_by_hand(options: dict[str, Any], lam: float, share: float) -> None:
    before = CreditRule(**options).credit([GROUP], lam)
    found = CreditRule(**options, singleton_baseline="library").credit([GROUP], lam, library=Known())
    # a: (1 − 0.5) / 0.5 = 1; b: the score 0 − 0.1 for the invalid action, (−0.1 − 0.25) / 0.5 = −0.7; s as before
    own = [float(before.step_advantage[0]), 1.0, float(before.step_advantage[2]), -0.7]
    assert before.step_advantage[[1, 3]].tolist() == [0.0, 0.0]
    assert found.step_advantage.tolist() == pytest.approx(own, rel=1e-5)
    wanted = before.advantage + share * (found.step_advantage - before.step_advantage)
    assert found.advantage.tolist() == pytest.approx(wanted.tolist(), rel=1e-12)
    assert (found.library_steps, before.library_steps) == (2, None)


def test_penalties_in_the_returns_are_not_taken_twice_and_norm_none_divides_by_nothing() -> None:
    rule = CreditRule(penalty_in_returns=True, norm="none", singleton_baseline="library")
    # b: the return itself is −0.1
    assert rule.credit([GROUP], 0.5, library=Known()).step_advantage[[1, 3]].tolist() == pytest.approx([0.5, -0.35])


def test_none_asks_no_library() -> None:
    plain, asked = CreditRule().credit([GROUP], 0.5), CreditRule().credit([GROUP], 0.5, library=Known())
    assert asked.advantage.equal(plain.advantage)
    assert asked.library_steps is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"singleton_baseline": "mean"}, "singleton_baseline='mean': choose one of none, library"),
        (
            {"singleton_baseline": "library", "estimator": "grpo"},
            "singleton_baseline='library': the estimator grpo has no step advantages",
        ),
    ],
)
def test_a_bad_option_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"data\.credit\.{message}"):
        CreditRule(**options)


def test_without_the_callback_it_is_refused_before_anything_is_played(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"singleton_baseline='library': there is no AnchorLibrary in trainer\.callb"):
        fit(tmp_path, data=LIBRARY)
    assert not list(tmp_path.rglob("*.arrow"))


def test_its_place_in_the_list_of_callbacks_plays_no_part(tmp_path: Path) -> None:
    """`WarmStart` checks the options in its own first hook, before that of a callback after it."""
    fit(tmp_path, 1, [WarmStart(episodes=2, epochs=1), AnchorLibrary()], LIBRARY)


class Fracs(AnchorLibrary):
    """Keeps the figure of each iteration."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.fracs: list[float] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        self.fracs.append(trainer.datamodule.report.metrics[FRAC])


FEW = {**LIBRARY, "tasks": BoxTasks(3, size=4), "members": 2, "groups": 6}


def fracs(folder: Path, epochs: int = 4, data: dict[str, Any] | None = None, **options: Any) -> list[float]:
    library = Fracs(**options)
    fit(folder, epochs, [library], data or FEW)
    return library.fracs


def test_training_feels_it_from_the_second_iteration_on_and_the_figure_is_right(tmp_path: Path) -> None:
    """The oracle goes through the written rollouts with a dictionary of lists."""
    library = Fracs()
    fit(tmp_path, 4, [library], FEW)
    seen: dict[tuple[str, str], list[float]] = {}
    total_used = total = 0
    for number, (rows, frac) in enumerate(zip(rollouts(tmp_path), library.fracs, strict=True)):
        names = ("anchor", "step_return", "step_group", "step_advantage")
        turns = [(row["task_id"], *turn) for row in rows for turn in zip(*(row[name] for name in names), strict=True)]
        groups = [turn[3] for turn in turns]
        used = 0
        for task, anchor, step_return, group, advantage in turns:
            earlier = seen.get((task, anchor), [])
            if groups.count(group) > 1:
                continue
            if len(earlier) < 2 or np.ptp(earlier) < 1e-12:
                assert advantage == 0.0
                continue
            used += 1
            bound = len(earlier) / (len(earlier) + 1) ** 0.5
            wanted = (step_return - np.mean(earlier)) / (np.std(earlier, ddof=1) + 1e-6)
            assert advantage == pytest.approx(np.clip(wanted, -bound, bound), abs=1e-6)
        assert frac == pytest.approx(used / len(turns))
        assert (used > 0) == (number > 0)
        total_used, total = total_used + used, total + len(turns)
        for task, anchor, step_return, *_ in turns:
            seen.setdefault((task, anchor), []).append(step_return)
    # The benchmark replays the same files.
    replayed = replay(sorted(tmp_path.glob("rollouts/*.arrow")), "task", 0)
    assert (replayed["steps"], replayed["used_of_steps"]) == (total, pytest.approx(total_used / total))


def test_equal_keys_of_other_tasks_count_for_the_scope_world(tmp_path: Path) -> None:
    many = {**FEW, "tasks": BoxTasks(3, size=100_000)}  # no task comes twice
    assert fracs(tmp_path / "task", data=many) == [0.0] * 4
    assert min(fracs(tmp_path / "world", data=many, scope="world")[1:]) > 0


def test_equal_observations_are_one_anchor_for_the_scope_text(tmp_path: Path) -> None:
    many = {**FEW, "tasks": BoxTasks(3, size=100_000)}
    library = Fracs(scope="text")
    fit(tmp_path, 2, [library], many)
    seen = {text for rows in rollouts(tmp_path) for row in rows for text in row["observation"]}
    assert len(library.table) == len(seen) == len(set(library.table.texts))
    assert library.fracs[1] > 0


def test_a_library_from_a_file_is_felt_in_the_first_iteration(tmp_path: Path) -> None:
    fit(tmp_path / "a", 4, [AnchorLibrary()], FEW)
    assert fracs(tmp_path / "b", epochs=1)[0] == 0.0
    assert fracs(tmp_path / "c", epochs=1, load_from=str(tmp_path / "a/anchors.arrow"))[0] > 0


def test_a_reset_is_felt(tmp_path: Path) -> None:
    # Reset in iterations 1, 2 and 3, each before its own turns are added: one iteration is ever remembered.
    plain, reset = fracs(tmp_path / "a", epochs=5), fracs(tmp_path / "b", epochs=5, reset_every=1)
    assert plain[:2] == reset[:2]
    assert sum(reset[2:]) < sum(plain[2:])


def test_the_bound_is_felt_and_kept(tmp_path: Path) -> None:
    library = Fracs(max_anchors=3)
    fit(tmp_path / "b", 4, [library], FEW)
    assert len(library.table) <= 3
    assert sum(library.fracs) < sum(fracs(tmp_path / "a"))


def test_a_resumed_run_has_the_same_baseline(tmp_path: Path) -> None:
    fit(tmp_path / "a", 4, [AnchorLibrary(), IterationCheckpoint()], FEW)
    fit(tmp_path / "b", 2, [AnchorLibrary(), IterationCheckpoint()], FEW)
    fit(tmp_path / "b", 4, [AnchorLibrary(), IterationCheckpoint()], FEW, ckpt_path="last")
    assert rollouts(tmp_path / "a") == rollouts(tmp_path / "b")


def test_another_scope_than_that_of_file_or_checkpoint_is_refused(tmp_path: Path) -> None:
    AnchorTable("world").save(tmp_path / "world.arrow")
    with pytest.raises(ValueError, match=r"scope=task, but load_from=.*world\.arrow has a library of scope world"):
        AnchorLibrary(load_from=str(tmp_path / "world.arrow"))
    fit(tmp_path, 1, [AnchorLibrary(), IterationCheckpoint()], FEW)
    with pytest.raises(ValueError, match=r"scope=world, but the checkpoint has a library of scope task"):
        fit(tmp_path, 2, [AnchorLibrary(scope="world"), IterationCheckpoint()], FEW, ckpt_path="last")
