"""How a command ends and what it leaves behind; where it looks for worlds, and how it names itself and its files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from gigpo_lightning import __main__
from gigpo_lightning.cli_interrupt import signal_of
from gigpo_lightning.paths import shown
from tests.cli_world import LineModule, enter, run_line


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return enter(tmp_path, monkeypatch)


def end_at_the_third_iteration(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    """Let the process get a signal when two iterations are done."""

    def send(module: LineModule) -> None:
        if module.trainer.current_epoch == 2:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(LineModule, "on_train_epoch_start", send)


def test_ctrl_c_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, own_folder: Path
) -> None:
    end_at_the_third_iteration(monkeypatch, signal.SIGINT)
    Path("mine.yaml").write_text("seed_everything: 3\n")
    # A shell that starts the tests in the background lets them ignore it.
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(SystemExit) as end:
        run_line("fit", "--config", "mine.yaml", "--trainer.logger=false", epochs=9)
    signal.signal(signal.SIGINT, former)  # the trainer ignores a second one
    assert end.value.code == 130
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == (
        "interrupted: runs/mine/version_0 holds the finished iterations; go on with: python -m gigpo_lightning fit "
        "--config mine.yaml --ckpt_path last (and the other options)"
    )


def test_sigterm_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, own_folder: Path
) -> None:
    end_at_the_third_iteration(monkeypatch, signal.SIGTERM)
    given = ["--trainer.default_root_dir", "mine"]
    with pytest.raises(SystemExit) as end:
        run_line("fit", "--trainer.logger=false", *given, epochs=9)
    assert end.value.code == 143
    assert capsys.readouterr().err.splitlines()[-1] == (
        "told to end (SIGTERM): mine holds the finished iterations; go on with: python -m gigpo_lightning fit "
        "--trainer.default_root_dir mine --ckpt_path last (and the other options)"
    )
    monkeypatch.undo()
    monkeypatch.chdir(own_folder)
    assert run_line("fit", "--trainer.logger=false", *given, "--ckpt_path=last", epochs=4).trainer.current_epoch == 4


def test_sigterm_ends_at_once_and_leaves_nothing_before_the_first_iteration(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, own_folder: Path
) -> None:
    reached: list[str] = []

    def told(self: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        reached.append("behind it")

    monkeypatch.setattr("gigpo_lightning.cli.GiGPOCLI.after_instantiate_classes", told)
    with pytest.raises(SystemExit) as end:
        run_line("fit", "--trainer.default_root_dir=mine", epochs=1)
    assert end.value.code == 143 and not reached
    assert capsys.readouterr().err.splitlines()[-1] == "told to end (SIGTERM)"
    assert not Path("mine").exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_run_without_a_finished_iteration_is_begun_again_by_what_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, own_folder: Path
) -> None:
    def told(module: LineModule) -> None:
        Path("mine/rollouts").mkdir()
        Path("mine/rollouts/iteration.arrow").write_text("what was played")
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(LineModule, "on_train_epoch_start", told)
    with pytest.raises(SystemExit):
        run_line("fit", "--trainer.default_root_dir=mine", epochs=1)
    assert capsys.readouterr().err.splitlines()[-1] == (
        "told to end (SIGTERM): mine holds the run; go on with: python -m gigpo_lightning fit "
        "--trainer.default_root_dir=mine --ckpt_path last (and the other options)"
    )
    monkeypatch.undo()
    monkeypatch.chdir(own_folder)
    assert run_line("fit", "--trainer.default_root_dir=mine", "--ckpt_path=last", epochs=1).trainer.current_epoch == 1


def test_ctrl_c_before_the_first_iteration_has_nothing_to_go_on_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, own_folder: Path
) -> None:
    def press(self: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gigpo_lightning.cli.GiGPOCLI.before_instantiate_classes", press)
    with pytest.raises(SystemExit) as end:
        run_line("fit", epochs=1)
    assert end.value.code == 130
    assert capsys.readouterr().err.splitlines() == ["interrupted"]


def test_other_exits_are_no_interrupts() -> None:
    assert signal_of(SystemExit(0)) is signal_of(ValueError()) is None
    assert signal_of(KeyboardInterrupt()) == signal.SIGINT
    assert signal_of(SIGTERMException()) == signal.SIGTERM


def test_the_help_names_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        __main__.main(["fit", "--help"])
    usage = capsys.readouterr().out.partition("\n\n")[0]
    assert usage.startswith("usage: python -m gigpo_lightning")
    assert "__main__.py" not in usage and "fit" in usage


def test_the_installed_command_finds_a_world_in_the_working_folder(own_folder: Path) -> None:
    Path("own_world_of_mine.py").write_text("")
    code = (
        "import sys, gigpo_lightning.__main__ as m; sys.argv = ['gigpo-lightning', '--version']; m.main(); "
        "import own_world_of_mine"
    )
    root = Path(__file__).parents[1]
    # As a console script is started: its own folder comes first, the working folder not at all.
    start = f"import sys; sys.path[:1] = []; sys.path.append({str(root)!r}); {code}"
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_file_without_content(own_folder: Path) -> None:
    run_line("fit", epochs=1)
    written = [path.name for path in Path("runs/default/version_0").iterdir()]
    assert any(name.startswith("events.out") for name in written)
    assert "hparams.yaml" not in written


def test_paths_are_shown_as_they_are_typed(own_folder: Path) -> None:
    assert shown(own_folder / "a" / "b.txt") == "a/b.txt"
    assert shown("/elsewhere/x") == "/elsewhere/x"
    assert shown("a/b") == "a/b"
