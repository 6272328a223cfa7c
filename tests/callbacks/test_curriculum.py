"""The curriculum in training: bad options, the hook by hand, inside a fit, after a resume."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from gigpo_lightning.callbacks.checkpoint import IterationCheckpoint
from gigpo_lightning.callbacks.curriculum import Curriculum
from gigpo_lightning.callbacks.exploration import Exploration
from gigpo_lightning.callbacks.stage_report import stage_table, visit
from gigpo_lightning.curriculum import Stage
from gigpo_lightning.rollout.task_choice import ClassCount
from tests import toy_run
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


LADDER = """\
stages:
  - {name: low, promote: 0.7, window: 2, min_iterations: 2}
  - {name: high, promote: 0.7, window: 2, min_iterations: 3, demote: 0.3}
"""


def test_in_a_fit_a_stage_is_gone_back_from_and_promoted_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ladder.yaml").write_text(LADDER)
    curriculum = Curriculum(str(tmp_path / "ladder.yaml"))
    boosted = Exploration(temperature_boost=1.0, boost_iterations=2)
    #       low       high           low       high: three iterations at least, though the second is lower than 0.3
    rates = [0.8, 0.8, 0.2, 0.2, 0.2, 0.8, 0.8, 0.0, 0.2, 0.9, 0.9]
    _, _, data = fit(tmp_path, [curriculum, boosted, IterationCheckpoint()], rates, epochs=11)
    assert [entry["stage"] for entry in data.seen] == ["low"] * 2 + ["high"] * 3 + ["low"] * 2 + ["high"] * 4
    assert curriculum.promoted_at == 7
    # 1 + max(0, 1 − n / 2) after each promotion (iterations 2 and 7); a demotion (iteration 5) boosts nothing
    temperatures = [entry["temperature"] for entry in data.seen]
    assert temperatures == [1, 1, 2, 1.5, 1, 1, 1, 2, 1.5, 1, 1]
    assert [entry["rehearsal"] for entry in data.seen][4:8] == [["low"], [], [], ["low"]]
    # What the report says of it: exits are the averages over two iterations, (0.2 + 0.2) / 2 for the demotion.
    rows = json.loads((tmp_path / "stages.json").read_text())["stages"]
    keys = ("stage", "first_iteration", "iterations", "env_steps", "success_entry", "success_exit", "moved")
    assert [tuple(row[key] for key in keys) for row in rows] == [
        ("low", 0, 2, 80, 0.8, 0.8, "promoted"),
        ("high", 2, 3, 120, 0.2, 0.2, "demoted"),
        ("low", 5, 2, 80, 0.8, 0.8, "promoted"),
        ("high", 7, 4, 160, 0.0, 0.9, "passed"),
    ]
    assert rows[1]["why"] == "success 0.200 < 0.3"
    shown = capsys.readouterr().out
    assert "Stages of the curriculum" in shown
    assert re.search(r"│ high +│ 3 +│ 120 +│ 0.200 +│ 0.200 +│ demoted: success 0.200 < 0.3 +│", shown)  # on one line


def test_a_narrow_terminal_breaks_between_words_and_cuts_nothing_off(monkeypatch: pytest.MonkeyPatch) -> None:
    row = visit(Stage(name="two-objects", min_iterations=6), [[1, 10]], 1, 48232, None, "1 of at least 6 iterations")
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "dumb")  # of 80 columns, without colours
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = stage_table([row]).splitlines()
    assert max(len(line) for line in lines) <= 80
    columns = zip(*(line.split("│")[1:-1] for line in lines[4:-1]), strict=True)
    assert [" ".join(" ".join(part).split()) for part in columns] == [
        *("two-objects", "1", "48,232", "0.100", "0.100"),
        "the run ended: 1 of at least 6 iterations",
    ]


def test_a_cut_anywhere_in_a_demotion_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "ladder.yaml").write_text(LADDER)
    rates = [0.8, 0.8, 0.2, 0.2, 0.2, 0.8, 0.8, 0.0]

    def callbacks() -> list:
        return [Curriculum(str(tmp_path / "ladder.yaml")), Exploration(temperature_boost=1.0), IterationCheckpoint()]

    straight = fit(tmp_path / "a", callbacks(), rates, epochs=8)[2].seen
    for cut in (4, 5, 6):  # before, at and after the demotion
        fit(tmp_path / str(cut), callbacks(), rates, epochs=cut)
        rest = fit(tmp_path / str(cut), callbacks(), rates, epochs=8, ckpt_path="last")[2].seen
        assert rest == straight[cut:]


def test_a_demotion_takes_a_pass_back(tmp_path: Path) -> None:
    (tmp_path / "ladder.yaml").write_text(LADDER)
    curriculum, data = Curriculum(str(tmp_path / "ladder.yaml"), start="high", stop_when_passed=False), TinyRollouts([])
    for won, stage, passed in [(9, "high", False), (9, "high", False), (9, "high", True), (0, "high", True)]:
        play(curriculum, data, won)
        assert (curriculum.stage.name, curriculum.passed) == (stage, passed)
    play(curriculum, data, 0)
    assert (curriculum.stage.name, curriculum.passed) == ("low", False)


SCHEDULE = """\
stages:
  - {name: short, iterations: 3, max_turns: 12, start_turns: 4, grow_iterations: 2}
  - {name: long, iterations: 2, max_turns: 30}
"""


def test_a_fixed_schedule_moves_whatever_the_success_and_its_horizon_grows(tmp_path: Path) -> None:
    (tmp_path / "schedule.yaml").write_text(SCHEDULE)
    for name, rates in (("bad", [0.0]), ("good", [1.0])):
        trainer, _, data = fit(tmp_path / name, [Curriculum(str(tmp_path / "schedule.yaml"))], rates, epochs=50)
        # 4 → 12 in two iterations; the second stage plays its own limit
        assert [(entry["stage"], entry["turn_limit"]) for entry in data.seen] == [
            ("short", 4),
            ("short", 8),
            ("short", 12),
            ("long", None),
            ("long", None),
        ]
        assert trainer.should_stop
        rows = json.loads((tmp_path / name / "stages.json").read_text())["stages"]
        assert [(row["moved"], row["success_exit"]) for row in rows] == [("promoted", rates[0]), ("passed", rates[0])]
        assert rows[0]["why"] == "3 of 3 iterations, a fixed schedule"


def test_episodes_are_cut_at_the_growing_limit_and_evaluations_are_not(tmp_path: Path) -> None:
    (tmp_path / "grow.yaml").write_text("stages: [{name: s, max_turns: 3, start_turns: 1, grow_iterations: 2}]")
    callbacks = [Curriculum(str(tmp_path / "grow.yaml"))]
    _, _, data = toy_run.fit(tmp_path, 3, callbacks, {"keep_rollouts": 9})
    longest = [max(max(row["turn_index"]) + 1 for row in rows) for rows in toy_run.rollouts(tmp_path)]
    assert longest == [1, 2, 3]
    assert data.report.metrics["curriculum/max_turns"] == 3
    assert {job.max_turns for batch in data.val_dataloader() for job in batch.jobs} == {3}


def test_a_resumed_run_goes_on_with_the_same_horizon(tmp_path: Path) -> None:
    (tmp_path / "schedule.yaml").write_text(SCHEDULE)
    for epochs, path in ((1, None), (3, "last")):
        callbacks = [Curriculum(str(tmp_path / "schedule.yaml")), IterationCheckpoint()]
        _, _, data = fit(tmp_path, callbacks, [0.5], epochs=epochs, ckpt_path=path)
    assert [entry["turn_limit"] for entry in data.seen] == [8, 12]


def test_tasks_drawn_by_signal_are_promoted_by_the_rate_of_a_uniform_draw(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "stages: [{name: a, task_choice: signal, min_iterations: 1, window: 1}, {name: b}]"
    )
    curriculum, data = Curriculum(str(tmp_path / "c.yaml")), TinyRollouts([])
    curriculum._apply(data.controls)
    assert data.controls.signal is curriculum.signal
    curriculum.signal.estimates = {"easy": 0.0, "hard": 0.25}
    data.iteration = 1
    # Kept: easy 0.05 / 0.3 = 1/6, hard 1. Weighted back: won 6 · 9 + 1 · 4 = 58 of 6 · 9 + 1 · 11 = 65 episodes.
    classes = {"easy": ClassCount(9, 9, 0.0, 1), "hard": ClassCount(4, 11, 0.25, 1)}
    data.report = Report(success={"a": (13, 20)}, classes=classes)
    curriculum.count(data)
    assert data.report.metrics["curriculum/average"] == pytest.approx(58 / 65)  # 13 / 20 would not promote
    assert data.report.metrics["curriculum/task_spread"] == 0.125
    assert data.report.metrics["curriculum/task_classes"] == 2
    assert curriculum.stage.name == "b"
    assert data.controls.signal is None
    assert curriculum.signal.estimates == {}  # those of a are forgotten


def test_what_is_known_of_the_tasks_is_in_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("stages: [{name: a, task_choice: signal}]")
    curriculum, data = Curriculum(str(tmp_path / "c.yaml")), TinyRollouts([])
    data.iteration = 1
    data.report = Report(success={"a": (4, 8)}, classes={"x": ClassCount(4, 8, 0.0, 1)})
    curriculum.count(data)
    torch.save(curriculum.state_dict(), tmp_path / "state")
    other = Curriculum(str(tmp_path / "c.yaml"))
    other.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert other.signal.estimates == curriculum.signal.estimates == {"x": pytest.approx(0.7 * 0.25)}
    assert other.state_dict() == curriculum.state_dict()


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, file: str) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ValueError, match=r"trainer\.default_root_dir=.*taken is not a folder"):
        fit(tmp_path / "taken", [Curriculum(file)], [0.5], epochs=1)


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
    state = resumed.state_dict()
    assert [state.pop(name) for name in ("visits", "signal")] == [resumed.visits, {}]
    # two iterations of 40 steps in c
    assert state == {"stage": "c", "history": [[2, 10], [9, 10]], "promoted_at": 4, "passed": False, "env_steps": 80}
    reports = [json.loads((tmp_path / run / "stages.json").read_text()) for run in "ab"]
    assert reports[0] == reports[1]
    assert [(row["stage"], row["first_iteration"], row["moved"]) for row in reports[0]["stages"]] == [
        ("a", 0, "promoted"),
        ("b", 2, "promoted"),
        ("c", 4, None),
    ]


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
