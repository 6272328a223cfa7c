"""Where a command writes and what it starts from: no run overwrites another, and a refused command changes nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gigpo_lightning import __main__, cli_run
from gigpo_lightning.cli_place import place_run
from tests.cli_world import enter
from tests.cli_world import run_line as line

ROOT = Path(__file__).parents[1]
R = "--trainer.default_root_dir=R"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test runs in an empty folder and leaves nothing behind in the environment."""
    return enter(tmp_path, monkeypatch)


def trained(*args: str) -> Path:
    """The folder of a finished run with one checkpoint."""
    cli = line("fit", *args, epochs=1)
    assert cli.place is not None
    folder = cli.place.folder.path
    for path in (folder / "checkpoints").iterdir():
        path.unlink()  # Lightning's own name for it
    cli.trainer.save_checkpoint(folder / "checkpoints" / "iteration=000001.ckpt")
    return folder


def refused(capsys: pytest.CaptureFixture[str], command: str, *args: str) -> str:
    """The one message with which the command is refused."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        line(command, *args, epochs=1 if command == "fit" else None)
    assert end.value.code == 2
    text = capsys.readouterr().err
    assert text.count("error: ") == 1, text
    return text.partition("error: ")[2]


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder with what it holds."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path): path.read_bytes() for path in files}


# -- a refused command -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [["--ckpt_path=last"], ["--ckpt_path=last", R]])
def test_a_refused_resume_changes_no_file(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The checkpoint is refused when it is loaded: by then the logger has begun a file."""
    folder = trained(*args[1:])
    before = content(folder)
    assert "another model" in refused(capsys, "fit", "--model.width=3", "--data.width=3", *args)
    assert content(folder) == before
    assert any(name.endswith("config.yaml") for name in before)


def test_a_resume_refused_for_its_seed_changes_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--trainer.max_epochs=1", "--data.groups=1", "--data.evaluation.tasks=1", "--data.evaluation.seeds=1"]
    assert __main__.main(["fit", "--config=alfworld.yaml", *small]) == 0
    before = content(Path("runs"))
    with pytest.raises(SystemExit):
        __main__.main(["fit", "--config=alfworld.yaml", *small, "--ckpt_path=last", "--data.seed=5"])
    assert "data.seed=5" in capsys.readouterr().err
    assert content(Path("runs")) == before


def test_a_folder_with_files_of_the_users_own_gets_nothing_from_a_refused_run(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("R").mkdir()
    Path("R/notes.txt").write_text("mine")
    refused(capsys, "fit", R, "--data.missing=true")
    assert [path.name for path in Path("R").iterdir()] == ["notes.txt"]


def test_a_run_that_fails_before_its_first_iteration_leaves_no_folder(own_folder: Path) -> None:
    with pytest.raises(RuntimeError, match="shape"):
        line("fit", "--model.fault=bug", epochs=1)
    assert not Path("runs").exists()


# -- a folder that holds a run -----------------------------------------------------------------------------------------


def test_a_new_run_does_not_overwrite_another(capsys: pytest.CaptureFixture[str]) -> None:
    folder = trained(R)
    before = content(folder)
    said = refused(capsys, "fit", R)
    assert "R holds an unfinished run: fit with --ckpt_path last goes on with it; for another one choose" in said
    assert "another folder with --trainer.default_root_dir" in said
    assert content(folder) == before
    (folder / "results.json").write_text("{}")
    assert "R holds a finished run" in refused(capsys, "fit", R)
    assert line("fit", R, "--ckpt_path=last", epochs=2).trainer.global_step == 4  # 2 epochs of 2 steps in all


def test_an_evaluation_in_the_folder_of_a_run_gets_a_subfolder(own_folder: Path) -> None:
    folder = trained(R)
    before = content(folder)
    for number in range(2):
        cli = line("test", R, "--ckpt_path=last")
        assert cli.place is not None
        assert cli.place.folder.path == Path(f"R/test_{number}")
    assert {name: data for name, data in content(folder).items() if "/test_" not in name} == before


# -- two processes -----------------------------------------------------------------------------------------------------


def test_a_run_in_use_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    trained(R)
    held = cli_run.reopen(Path("R"))
    before = content(Path("R"))
    assert "R is in use" in refused(capsys, "fit", R, "--ckpt_path=last")
    assert "R is in use" in refused(capsys, "fit", R)
    assert content(Path("R")) == before
    held.release()
    line("fit", R, "--ckpt_path=last", epochs=2)


def test_a_killed_process_holds_no_folder(own_folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from gigpo_lightning import cli_run\n"
        "cli_run.claim(Path('runs'), 'version'); print('claimed', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"PYTHONPATH": str(ROOT)}
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"claimed\n"
        with pytest.raises(ValueError, match=r"runs/version_0 is in use"):
            cli_run.reopen(Path("runs/version_0"))
        process.send_signal(signal.SIGKILL)
        process.wait()
    cli_run.reopen(Path("runs/version_0")).release()


# -- which run `last` means --------------------------------------------------------------------------------------------


def test_a_run_without_a_checkpoint_does_not_hide_the_one_before(capsys: pytest.CaptureFixture[str]) -> None:
    trained()
    Path("runs/default/version_1/rollouts").mkdir(parents=True)
    for wanted in ("last", "best"):
        place = place_run("fit", Path("runs/default"), wanted=wanted)
        place.folder.release()
        assert place.checkpoint == "runs/default/version_0/checkpoints/iteration=000001.ckpt"
        said = capsys.readouterr().err
        assert f"runs/default/version_1 has no whole checkpoint: {wanted} is that of runs/default/version_0" in said
    assert place_run("fit", Path("runs/default"), wanted="last").folder.path == Path("runs/default/version_0")


def test_last_is_sought_where_the_checkpoints_are_told_to_be_written(own_folder: Path) -> None:
    Path("mine.yaml").write_text(
        "trainer: {num_sanity_val_steps: 0, callbacks: [{class_path: IterationCheckpoint, init_args: {folder: X}}]}\n"
        "data: {groups: 1, members: 2, evaluation: {tasks: 1, seeds: 1, greedy: false}}\n"
    )
    call = ["fit", "--config=alfworld.yaml", "--config=mine.yaml"]
    assert __main__.main([*call, "--trainer.max_epochs=1"]) == 0
    assert __main__.main([*call, "--trainer.max_epochs=2", "--ckpt_path=last"]) == 0
    numbered = ["iteration=000001.ckpt", "iteration=000002.ckpt"]
    assert sorted(path.name for path in Path("X").iterdir()) == ["best.ckpt", *numbered, "last.ckpt"]
    assert [path.name for path in Path("runs/alfworld").iterdir()] == ["version_0"]


# -- files that are no checkpoints of ours -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "missing"),
    [
        ({}, "state_dict"),
        ({"line.weight": torch.ones(1, 4)}, "state_dict"),
        (torch.ones(3), "state_dict"),
        ([1, 2], "state_dict"),
        ({"state_dict": {}, "pytorch-lightning_version": "2.6", "loops": {}, "callbacks": {}}, "optimizer_states"),
    ],
)
def test_a_foreign_file_says_what_it_lacks(saved: Any, missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(saved, "some.ckpt")
    text = refused(capsys, "fit", "--ckpt_path=some.ckpt")
    assert text.startswith("--ckpt_path some.ckpt: not a checkpoint of gigpo_lightning: it lacks ")
    assert missing in text
    assert not Path("runs").exists()


def test_a_checkpoint_of_another_program_says_what_it_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    """Lightning's own, from other modules: an evaluation needs no optimiser, but the policy's and the data's state."""
    line("fit", epochs=1).trainer.save_checkpoint("line.ckpt")
    line("test", "--ckpt_path=line.ckpt")
    with pytest.raises(SystemExit):
        __main__.main(["test", "--config=alfworld.yaml", "--ckpt_path=line.ckpt"])
    assert "it lacks policy_identity, RolloutDataModule" in capsys.readouterr().err
    assert not Path("runs/alfworld").exists()


def test_a_folder_is_no_checkpoint(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("some.ckpt").mkdir()
    assert "--ckpt_path some.ckpt: a folder" in refused(capsys, "fit", "--ckpt_path=some.ckpt")
    assert not Path("runs").exists()
