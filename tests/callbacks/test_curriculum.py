"""The curriculum in training: bad options, the hook by hand, inside a fit, after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gigpo_lightning.callbacks.checkpoint import IterationCheckpoint
from gigpo_lightning.callbacks.curriculum import Curriculum
from tests.callbacks.tiny import Report, TinyRollouts, fit

THREE = """\
stages:
  - {name: a, promote: 0.8, window: 2, min_iterations: 2}
  - {name: b, promote: 0.8, window: 2, min_iterations: 2, rehearsal: 0.25, demote: 0.3}
  - {name: c, promote: 0.8, window: 2, min_iterations: 2, rehearsal: 0.1}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "three.yaml"
    path.write_text(THREE)
    return str(path)


def play(curriculum: Curriculum, data: TinyRollouts, won: int, stage: str | None = None) -> None:
    """One reported iteration: `won` of 10 episodes of the present stage, and 99 won rehearsal episodes."""
    data.iteration += 1
    data.report = Report(success={stage or curriculum.stage.name: (won, 10), "rehearsed": (99, 99)})
    curriculum.count(data)


@pytest.mark.parametrize("start", [3, -1, "d", True])
def test_a_bad_start_lists_the_stages(file: str, start: int | str) -> None:
    with pytest.raises(ValueError, match=rf"start is {start!r}, but .* 0 = a, 1 = b, 2 = c"):
        Curriculum(file, start=start)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ValueError, match="nowhere"):
        Curriculum("nowhere.yaml")


@pytest.mark.parametrize("start", [1, "b"])
def test_start_by_number_or_name(file: str, start: int | str) -> None:
    assert Curriculum(file, start=start).stage.name == "b"


def test_by_hand_up_down_and_passed(file: str) -> None:
    curriculum, data = Curriculum(file), TinyRollouts([0.0])
    for won, stage in [(9, "a"), (9, "b"), (9, "b"), (9, "c"), (2, "c")]:
        play(curriculum, data, won)
        assert curriculum.stage.name == stage
        assert data.controls.stage is curriculum.stage
    assert [stage.name for stage in data.controls.rehearsal] == ["a", "b"]
    assert curriculum.promoted_at == 4  # after the iterations 0 to 3
    assert not curriculum.passed
    for won in (9, 9):
        play(curriculum, data, won)
    assert curriculum.passed  # (9 + 9) / 20 = 0.9 in the last stage, which stays
    assert curriculum.stage.name == "c"


def test_demotion_goes_back_and_counts_anew(file: str) -> None:
    curriculum, data = Curriculum(file, start="b"), TinyRollouts([0.0])
    for won in (2, 2):
        play(curriculum, data, won)
    assert (curriculum.stage.name, curriculum.history, curriculum.promoted_at) == ("a", [], None)


def test_figures_are_those_of_the_stage_that_was_played(file: str) -> None:
    curriculum, data = Curriculum(file), TinyRollouts([0.0])
    play(curriculum, data, 7)
    play(curriculum, data, 9)
    assert curriculum.index == 1
    assert data.report.metrics == {
        "curriculum/stage": 0.0,
        "curriculum/iterations_in_stage": 2.0,
        "curriculum/average": 0.8,  # (7 + 9) / 20
    }


def test_rehearsal_only_iteration_does_not_promote(file: str) -> None:
    curriculum, data = Curriculum(file), TinyRollouts([0.0])
    for _ in range(3):
        play(curriculum, data, 10, stage="another")
    assert curriculum.stage.name == "a"


def test_in_a_fit_it_promotes_at_once_and_stops_after_the_last_stage(tmp_path: Path, file: str) -> None:
    trainer, _, data = fit(tmp_path, [Curriculum(file)], [1.0], epochs=50)
    # Two iterations a stage; the third collection already plays stage b.
    assert [entry["stage"] for entry in data.seen] == ["a", "a", "b", "b", "c", "c"]
    assert data.seen[2]["rehearsal"] == ["a"]
    assert trainer.current_epoch == 6


def test_it_can_go_on_in_the_last_stage(tmp_path: Path, file: str) -> None:
    _, _, data = fit(tmp_path, [Curriculum(file, stop_when_passed=False)], [1.0], epochs=8)
    assert [entry["stage"] for entry in data.seen][4:] == ["c"] * 4


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_resume_equals_uninterrupted(tmp_path: Path, file: str, cut: int) -> None:
    rates = [0.7, 0.9, 0.8, 0.9, 0.2, 0.9]
    _, _, straight = fit(tmp_path / "a", [Curriculum(file), IterationCheckpoint()], rates, epochs=6)
    fit(tmp_path / "b", [Curriculum(file), IterationCheckpoint()], rates, epochs=cut)
    resumed = Curriculum(file)
    _, _, rest = fit(tmp_path / "b", [resumed, IterationCheckpoint()], rates, epochs=6, ckpt_path="last")
    assert rest.seen == straight.seen[cut:]
    # a: (7+9)/20 = 0.8 → b: (8+9)/20 = 0.85 → c, where 0.2 and 0.9 stay
    assert resumed.state_dict() == {"stage": "c", "history": [[2, 10], [9, 10]], "promoted_at": 4, "passed": False}


def test_a_run_that_had_passed_stays_finished(tmp_path: Path, file: str) -> None:
    fit(tmp_path, [Curriculum(file), IterationCheckpoint()], [1.0], epochs=50)
    callbacks = [Curriculum(file), IterationCheckpoint()]
    trainer, _, data = fit(tmp_path, callbacks, [1.0], epochs=50, ckpt_path="last", eager=False)
    assert data.seen == []
    assert trainer.should_stop


def test_a_checkpoint_of_another_curriculum_is_refused(tmp_path: Path, file: str) -> None:
    fit(tmp_path, [Curriculum(file), IterationCheckpoint()], [0.5], epochs=1)
    other = tmp_path / "other.yaml"
    other.write_text("stages: [{name: x}]")
    with pytest.raises(ValueError, match=r"made in stage 'a', but curriculum .* has only x"):
        fit(tmp_path, [Curriculum(str(other)), IterationCheckpoint()], [0.5], epochs=2, ckpt_path="last")


def test_state_is_plain(file: str, tmp_path: Path) -> None:
    curriculum, data = Curriculum(file), TinyRollouts([0.0])
    play(curriculum, data, 9)
    torch.save(curriculum.state_dict(), tmp_path / "state")
    assert torch.load(tmp_path / "state", weights_only=True) == curriculum.state_dict()


def test_another_datamodule_is_refused(file: str) -> None:
    class Bare:
        datamodule = None

    with pytest.raises(TypeError, match="Curriculum needs a RolloutDataModule, but the trainer has NoneType"):
        Curriculum(file).on_fit_start(Bare(), None)
