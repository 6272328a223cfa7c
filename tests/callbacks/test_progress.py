"""The progress line and the closing table: bad option, by hand, inside a fit with and without a terminal, resumed."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gigpo_lightning.callbacks import progress
from gigpo_lightning.callbacks.checkpoint import IterationCheckpoint
from gigpo_lightning.callbacks.curriculum import Curriculum
from gigpo_lightning.callbacks.progress import Figures, IterationProgress, clock, fitted, line, success_of
from gigpo_lightning.callbacks.time_limit import TimeLimit
from tests.callbacks.tiny import Report, TinyRollouts, fit

FULL = Figures(12, 200, "2/5 appliances", 0.88, 0.734, 14.26, 1112.0)


@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_a_bad_option_is_named(value: float) -> None:
    with pytest.raises(ValueError, match=r"IterationProgress.refresh_s=.*: must be ≥ 0 seconds"):
        IterationProgress(refresh_s=value)


def test_line_by_hand() -> None:
    expected = "iteration 12/200 · stage 2/5 appliances · λ 0.88 · success 0.73 · 14 episodes/s · 18:32 left"
    assert line(FULL) == expected
    assert line(Figures(3)) == "iteration 3"
    assert line(Figures(3, episodes_per_s=0.26)) == "iteration 3 · 0.3 episodes/s"


@pytest.mark.parametrize("width", [10, 60, 79, 100, 140])
def test_fitted_is_exactly_as_wide_as_the_terminal(width: int) -> None:
    text = fitted(FULL, "update 3/8", width)
    assert len(text) == width
    assert ("18:32 left" in text) == (width >= 79)
    assert ("update 3/8" in text) == (width >= 140)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (61, "1:01"), (3599.6, "1:00:00"), (7322, "2:02:02"), (-3, "0:00")]
)
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_success_is_that_of_the_stage_played() -> None:
    data = TinyRollouts([0.0])
    data.report = Report(metrics={"rollout/success": 0.9}, success={"b": (1, 4), "a": (9, 9)})
    assert success_of(data, "b") == 0.25
    assert success_of(data, "") == 0.9


def curriculum(folder: Path) -> Curriculum:
    path = folder / "two.yaml"
    path.write_text("stages: [{name: a, min_iterations: 2}, {name: the-end, min_iterations: 2}]")
    return Curriculum(str(path))


def run(folder: Path, epochs: int, ckpt_path: str | None = None, **options: Any) -> None:
    callbacks = [curriculum(folder), IterationProgress(refresh_s=0.0), IterationCheckpoint()]
    fit(folder, callbacks, [0.9], epochs=epochs, ckpt_path=ckpt_path, enable_progress_bar=True, **options)


def test_without_a_terminal_one_line_per_iteration_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, epochs=9)
    output = capsys.readouterr().out
    assert "\r" not in output
    lines = [text for text in output.splitlines() if text.startswith("iteration")]
    stages = [re.search(r"stage (.*?) · λ", text)[1] for text in lines]
    assert stages == ["1/2 a", "1/2 a", "2/2 the-end", "2/2 the-end"]  # the stage that was played, not the next
    assert all(
        re.fullmatch(r"iteration \d/9 · .* success 0\.90 · [\d.]+ episodes/s · 0:\d\d left", text) for text in lines
    )
    assert "Training finished" in output
    assert "2/2 the-end (passed)" in output
    assert f"{tmp_path}/checkpoints/iteration=000004.ckpt" in output  # whole, on one line
    # The news of an iteration come after its line.
    assert re.search(r"^iteration 2/9 .*\nCurriculum: a → the-end", output, flags=re.MULTILINE)


def test_in_a_terminal_one_line_renews_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_is_terminal", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "160")
    run(tmp_path, epochs=2)
    before_table = capsys.readouterr().out.partition("Stages of the curriculum")[0]
    draws = before_table.split("\r")
    assert sum("update 2/2" in text for text in draws) == 2
    assert any("collecting" in text for text in draws)
    # The news of the promotion stands on a line of its own.
    assert re.search(r"\rCurriculum: a → the-end: success 0\.900 ≥ 0\.8\n", before_table)
    assert before_table.count("\n") == 1  # and no other line was broken


def test_other_processes_say_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Silenced(IterationProgress):
        def setup(self, trainer, pl_module, stage) -> None:
            super().setup(trainer, pl_module, stage)
            self.disable()

    fit(tmp_path, [Silenced()], [0.5], epochs=2, enable_progress_bar=True)
    assert capsys.readouterr().out == ""
    assert sys.stdout is not None


def test_resume_counts_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, epochs=1)
    capsys.readouterr()
    run(tmp_path, epochs=3, ckpt_path="last")
    output = capsys.readouterr().out
    numbers = re.findall(r"^iteration (\d)/3", output, flags=re.MULTILINE)
    assert numbers == ["2", "3"]
    # Which figures are of this process only.
    assert "3 (1 of them before the resume)" in output
    assert all(f"{name}, since the resume" in output for name in ("time", "episodes", "highest success in any stage"))


def test_the_evaluation_before_a_resumed_run_has_its_iteration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, epochs=2)
    capsys.readouterr()
    monkeypatch.setattr(progress, "_is_terminal", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "160")
    checked = {"num_sanity_val_steps": 1, "limit_val_batches": 1, "check_val_every_n_epoch": 9}
    run(tmp_path, epochs=3, ckpt_path="last", **checked)
    assert re.findall(r"\riteration (\S+) · evaluating", capsys.readouterr().out) == ["2/3"]


def test_the_share_is_the_one_that_the_estimator_used() -> None:
    """Estimators other than GiGPO set λ themselves, whatever the schedule says: GRPO's is 1."""
    data = TinyRollouts([0.5])
    data.collect()
    data.report.metrics["credit/lambda"] = 1.0
    bar = IterationProgress()
    bar._played = ("", "", 0.3)
    bar._count(SimpleNamespace(max_epochs=3, callbacks=[]), data)  # type: ignore[arg-type]
    assert bar.figures.lam == 1.0


def test_paths_are_shown_from_the_working_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path.parent)
    run(tmp_path, epochs=1)
    output = capsys.readouterr().out
    assert f"│ {tmp_path.name}/checkpoints/iteration=000001.ckpt" in output
    assert str(tmp_path) not in output
    assert "since the resume" not in output


def test_the_time_limit_has_a_line_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_is_terminal", lambda stream: True)
    limit = TimeLimit({"microseconds": 1})
    fit(tmp_path, [limit, IterationProgress(refresh_s=0.0)], [0.5], epochs=5, enable_progress_bar=True)
    shown = capsys.readouterr().out
    assert re.search(r"\rTime limit reached: the training ends with this iteration\n", shown)
    assert shown.count("Time limit reached") == 1
    assert limit.state_key == "Timer"


def test_an_evaluation_says_what_it_plays(capsys: pytest.CaptureFixture[str]) -> None:
    batch = SimpleNamespace(stage="house", split="unseen", mode="greedy", jobs=[None] * 100)
    bar, trainer = IterationProgress(), SimpleNamespace(num_test_batches=[24])
    bar.on_test_batch_start(trainer, None, batch, 2)  # type: ignore[arg-type]
    assert capsys.readouterr().out == "evaluation 3/24: house, unseen, greedy, 100 episodes …\n"
    uncounted = SimpleNamespace(num_test_batches=[float("inf")])  # what the trainer knows without a limit
    bar.on_test_batch_start(uncounted, None, batch, 2)  # type: ignore[arg-type]
    assert capsys.readouterr().out == "evaluation 3: house, unseen, greedy, 100 episodes …\n"
    bar.disable()
    bar.on_test_batch_start(trainer, None, batch, 3)  # type: ignore[arg-type]
    assert capsys.readouterr().out == ""
