"""Bad input ends with one clear message and exit code 2, and nothing is written; bugs keep their traceback."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from gigpo_lightning import __main__, cli_run
from gigpo_lightning.cli import GiGPOCLI
from gigpo_lightning.cli_errors import option_message
from gigpo_lightning.cli_faults import Constructors, is_bad_input
from tests.cli_world import LineData, LineModule

QUIET = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.logger=false"]
REAL = ["fit", "--config", "alfworld.yaml"]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test runs in an empty folder, without what the developer has set."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIGPO_RUN_PLACE", "")
    monkeypatch.delenv("GIGPO_TRACEBACK", raising=False)
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def message(capsys: pytest.CaptureFixture[str], code: object) -> str:
    """The one message on stderr, checked to be the only one and without a traceback."""
    assert code == 2
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    before, *errors = shown.err.split("error: ")
    assert len(errors) == 1, shown.err
    assert not before or before.endswith("\n")
    assert len(errors[0]) < 500
    return errors[0]


def refused(capsys: pytest.CaptureFixture[str], *call: str) -> str:
    """The message with which the real command line refuses the call."""
    with pytest.raises(SystemExit) as end:
        __main__.main(call)
    return message(capsys, end.value.code)


def line_refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The same for `fit` on the small module."""
    with pytest.raises(SystemExit) as end:
        GiGPOCLI("fit", [*QUIET, "--trainer.max_epochs=1", *args], LineModule, LineData)
    return message(capsys, end.value.code)


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--data.grups=4"], ["--data.grups", "did you mean --data.groups?"]),
        (["--data.group=4"], ["--data.group", "did you mean --data.groups?"]),  # no abbreviations
        (["--data.groups=four"], ["data.groups", "a whole number", "four"]),
        (["--model.clip_low=wide"], ["model.clip_low", "a number", "wide"]),
        (["--data.lam=1.5"], ["data.lam=1.5", "[0, 1]"]),
        (["--data.lam=nan"], ["lam", "nan"]),
        (["--data.members=1"], ["members=1", "at least 2"]),
        (["--data.groups=0"], ["groups=0", "at least 1"]),
        (["--data.tasks=GeneratedTask"], ["data.tasks", "GeneratedTask", "did you mean GeneratedTasks?"]),
        (["--model.aggregation=tokens"], ["aggregation", "tokens", "token"]),
        (["--trainer.accelerator=abacus"], ["abacus", "cpu"]),
        (["--model.critic.learning_rate=1"], ["unknown key model.critic.learning_rate", "clip, coef, detach, lr"]),
        (["--data.replay.max_age=ten"], ["data.replay.max_age", "a whole number", "ten"]),
        (["--data.replay=true"], ["data.replay", "named options", "or null", "true"]),
        (
            ["--data.credit.detector.init_args.threshold=0.5"],
            ["data.credit.detector", "class_path is missing", "exact"],
        ),
        (["--trainer.callbacks+=AnchorLibrary"], ["trainer.callbacks", "AnchorLibrary is listed twice"]),
        (["--trainer.callbacks+=TensorBoardViews"], ["trainer.callbacks", "TensorBoardViews is listed twice"]),
        (["--trainer.precision=16-true"], ["trainer.precision=16-true", "bf16-mixed"]),
        (["--trainer.strategy=ddp_spawn"], ["trainer.strategy=ddp_spawn", "choose ddp"]),
        (["--trainer.precision=64"], ["trainer.precision=64", "32-true"]),
        (["--trainer.max_time=soon"], ["'soon'", "DD:HH:MM:SS"]),
        (["--trainer.check_val_every_n_epoch=0"], ["trainer.check_val_every_n_epoch=0", "limit_val_batches"]),
    ],
)
def test_options(args: list[str], parts: list[str], own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(capsys, *REAL, *args)
    assert [part for part in parts if part not in text] == [], text
    assert list(own_folder.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("data:\n  grups: 4", ["data.grups", "did you mean data.groups?", "bad.yaml:2"]),
        ("seed_everything: 0\ndata:\n  lam: much", ["data.lam", "much", "bad.yaml:3"]),
        ("data: {credit: {gama: 0.9}}", ["data.credit.gama", "did you mean data.credit.gamma?"]),
        ("data: {credit: {detector: exakt}}", ["data.credit.detector", "'exakt'", "did you mean exact?"]),
        ("data: {credit: {detector: {class_path: ExaktDetector}}}", ["detector", "did you mean ExactDetector?"]),
        (
            "data: {credit: {detector: {class_path: SimilarityDetector, init_args: {threshold: 1.5}}}}",
            ["SimilarityDetector.threshold=1.5", "[0, 1]"],
        ),
        (
            "data: {credit: {detector: {class_path: ExactDetector, init_args: {target_density: [0.1, 0.2]}}}}",
            ["ExactDetector.target_density=[0.1, 0.2]", "no threshold to steer"],
        ),
        (
            "data: {credit: {detector: {class_path: ManualDetector, init_args: {patterns: [{action: '('}]}}}}",
            ["ManualDetector.patterns[0].action='('", "not a regular expression"],
        ),
        (
            "data: {credit: {detector: {class_path: HybridDetector, init_args: {exclude: [{predicate: 'os:no'}]}}}}",
            ["HybridDetector.exclude[0].predicate='os:no'", "os has no no"],
        ),
        ("trainer: {callbacks: [{class_path: LambdaDecai}]}", ["LambdaDecai", "did you mean LambdaDecay?"]),
        (
            "trainer: {callbacks: [{class_path: LambdaDecay, init_args: {start: 1.5}}]}",
            ["start", "1.5", "[0, 1]"],
        ),
        ("trainer: {callbacks: [{class_path: LambdaDecay, init_args: {begin: 1}}]}", ["begin"]),
        ("trainer: {callbacks: [{class_path: no.such.Thing}]}", ["no.such.Thing", "No module named"]),
        ("seed_everything: 0\ndata: [", ["--config bad.yaml", "YAML", "line 2"]),
        ("", ["--config bad.yaml", "is empty"]),
        ("- data", ["--config bad.yaml", "holds a list"]),
        ("seed_everything: \udcff", ["--config bad.yaml", "not UTF-8", "byte 17"]),
        ("optimiser: adam", ["optimiser"]),
        ("data:\n  groups: 4\n  members: 4\n  groups: 8", ["bad.yaml:4", "`groups` is given twice"]),
        ("data: {credit: {estimator: ppo}}", ["data.credit.estimator=ppo needs a critic", "model.critic.lr"]),
        (
            "trainer: {callbacks: []}\ndata: {credit: {singleton_baseline: library}}",
            ["singleton_baseline='library'", "no AnchorLibrary"],
        ),
    ],
)
def test_configurations(content: str, parts: list[str], own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.yaml").write_text(content, encoding="utf-8", errors="surrogateescape")
    text = refused(capsys, *REAL, "--config", "bad.yaml")
    assert [part for part in parts if part not in text] == [], text
    assert list(own_folder.iterdir()) == [own_folder / "bad.yaml"]


def test_a_call_without_configuration_says_which_to_choose(capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(capsys, "fit")
    assert "model.policy" in text
    assert "--config alfworld.yaml" in text


# -- curricula ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("stages: []", ["mine.yaml", "empty"]),
        ("stages:\n  - name: a\nstages:\n  - name: b", ["mine.yaml:3", "`stages` is given twice"]),
        (
            "stages:\n  - name: a\n    difficulty:\n      steps: 3\n      steps: 4",
            ["mine.yaml:5", "`steps` is given twice"],
        ),
        ("stages:\n  - name: a\n    promote: 1.5", ["mine.yaml:3", "`promote` is 1.5", "(0, 1]"]),
        ("stages:\n  - name: a\n    promot: 0.5", ["mine.yaml:3", "`promot`", "did you mean `promote`?"]),
        ("stages:\n  - name: a\n    difficulty: {recepticles: 3}", ["stage 'a'", "recepticles"]),
        ("stages:\n  - name: a\n  - name: b\n    difficulty: {recepticles: 3}", ["stage 'b'", "recepticles"]),
        (
            "stages:\n  - name: a\n  - name: [b\n    promote: 1",
            ["curriculum mine.yaml", "not readable as YAML: line 4"],
        ),
        (None, ["mine.yaml", "no such file"]),
    ],
)
def test_curricula(content: str | None, parts: list[str], own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if content is not None:
        Path("mine.yaml").write_text(content)
    Path("mine_run.yaml").write_text(
        "trainer:\n  callbacks: [{class_path: Curriculum, init_args: {curriculum: mine.yaml}}]\n"
    )
    text = refused(capsys, *REAL, "--config=mine_run.yaml")
    assert [part for part in parts if part not in text] == [], text
    assert not Path("runs").exists()


# -- data --------------------------------------------------------------------------------------------------------------


def test_a_missing_data_folder(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(capsys, *REAL, "--data.tasks=RecordedTasks", "--data.tasks.data_dir=nowhere")
    assert "nowhere" in text
    assert "alfworld-download" in text
    assert not Path("runs").exists()


def test_data_that_are_found_missing_at_set_up_leave_no_run(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By then the run's folder, its configuration and its log exist: they go again."""
    with pytest.raises(SystemExit) as end:
        GiGPOCLI("fit", [*QUIET[:2], "--trainer.max_epochs=1", "--data.missing=true"], LineModule, LineData)
    assert "data_dir=/nowhere" in message(capsys, end.value.code)
    assert not Path("runs").exists()


def test_a_corrupted_game_file(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "pick_and_place_simple-Mug-None-Desk-301"
    for split in ("train", "valid_seen", "valid_unseen"):
        trial = own_folder / "data" / "json_2.1.1" / split / name / "trial_T1"
        trial.mkdir(parents=True)
        (trial / "traj_data.json").write_text(json.dumps({"task_type": "pick_and_place_simple"}))
        (trial / "game.tw-pddl").write_text('{"pddl_domain": "(define')
    small = ["--trainer.max_epochs=1", "--data.groups=1", "--data.evaluation.tasks=1"]
    Path("no_curriculum.yaml").write_text("trainer: {callbacks: [], num_sanity_val_steps: 0}\n")
    data = ["--data.tasks=RecordedTasks", "--data.tasks.data_dir=data"]
    text = refused(capsys, *REAL, "--config=no_curriculum.yaml", *data, *small)
    assert "game.tw-pddl" in text


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_model(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli = GiGPOCLI("fit", [*QUIET, "--trainer.max_epochs=1"], LineModule, LineData)
    cli.trainer.save_checkpoint("four.ckpt")
    before = sorted(own_folder.rglob("*"))
    capsys.readouterr()
    text = line_refused(capsys, "--model.width=3", "--data.width=3", "--ckpt_path=four.ckpt")
    assert "--ckpt_path" in text
    assert "another model" in text
    assert "line.weight" in text
    assert sorted(own_folder.rglob("*")) == before


def test_a_checkpoint_of_another_policy(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--trainer.max_epochs=1", "--data.groups=1", "--data.evaluation.tasks=1", "--data.evaluation.seeds=1"]
    assert __main__.main([*REAL, *small]) == 0
    before = {path: path.read_bytes() for path in own_folder.rglob("*") if path.is_file()}
    capsys.readouterr()
    text = refused(capsys, *REAL, *small, "--ckpt_path=last", "--model.policy.hidden_size=32")
    assert "hidden_size" in text
    assert "64" in text
    assert "32" in text
    assert {path: path.read_bytes() for path in own_folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("content", [None, b"", b"not a checkpoint"])
def test_a_file_that_is_no_checkpoint(
    content: bytes | None, own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        Path("some.ckpt").write_bytes(content)
    assert "--ckpt_path some.ckpt" in line_refused(capsys, "--ckpt_path=some.ckpt")
    assert not Path("runs").exists()


# -- disk --------------------------------------------------------------------------------------------------------------


def test_a_nearly_full_disk(
    own_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100 * 2**20, 97 * 2**20, 3 * 2**20))
    text = line_refused(capsys)
    assert "3 MB are free" in text
    assert "runs/default" in text
    assert list(own_folder.iterdir()) == []


def test_a_read_only_folder(
    own_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(path: Path, *args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "mkdir", read_only)
    text = line_refused(capsys)
    assert "Read-only file system" in text
    assert "runs/default" in text
    assert "--runs_dir" in text


def test_a_file_in_the_place_of_the_folder(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs").write_text("mine")
    assert "runs/default" in line_refused(capsys)
    assert Path("runs").read_text() == "mine"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_disk_that_fills_up_during_the_run(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = line_refused(capsys, "--model.fault=full disk")
    assert "runs/default/version_0" in text
    assert "No space left on device" in text


# -- what is no bad input ----------------------------------------------------------------------------------------------


def test_a_bug_keeps_its_traceback(own_folder: Path) -> None:
    with pytest.raises(RuntimeError, match="shape"):
        GiGPOCLI("fit", [*QUIET, "--trainer.max_epochs=1", "--model.fault=bug"], LineModule, LineData)


def test_errors_of_the_first_hours_are_told_from_bugs() -> None:
    """Once the trainer works, a ValueError of foreign code is a bug; the same before comes from the options."""

    def foreign() -> Exception:
        try:
            int("x")
        except ValueError as error:
            return error
        raise AssertionError

    def ours() -> Exception:
        try:
            cli_run.check_writable(Path("/nowhere/at/all"))
        except OSError as error:
            return error
        raise AssertionError

    assert is_bad_input(foreign(), begun=False)
    assert not is_bad_input(foreign(), begun=True)
    assert is_bad_input(ours(), begun=True)
    assert not is_bad_input(KeyError("x"), begun=False)


def test_the_traceback_can_be_asked_for(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIGPO_TRACEBACK", "1")
    with pytest.raises(ValueError, match="members=1"):
        __main__.main([*REAL, "--data.members=1"])
    assert list(own_folder.iterdir()) == []


def test_the_process_itself_exits_with_2(own_folder: Path) -> None:
    """The same through the interpreter: nothing else on stderr after the message."""
    root = Path(__main__.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "gigpo_lightning", *REAL, "--data.lam=2"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert done.returncode == 2
    assert done.stderr.rstrip().splitlines()[-1].startswith("error: data.lam=2.0: λ must lie in [0, 1]")
    assert "Traceback" not in done.stderr


# -- wording -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("unrecognized arguments: --x.lrr=1 y", "unknown option --x.lrr; did you mean --x.lr?"),
        ("Option 'lamm' is not accepted", "unknown key lamm; did you mean lam?"),
        (
            'Parser key "x.n":\n  Does not validate against any of the Union subtypes\n  Subtypes: [int, None]\n'
            "  Errors:\n    - Expected a <class 'int'>\n    - Expected a <class 'NoneType'>\n"
            "  Given value type: <class 'str'>\n  Given value: few",
            "x.n: expected a whole number, got few",
        ),
        ("something\n  else", "something else"),
    ],
)
def test_the_parser_s_messages_are_shortened(said: str, shown: str) -> None:
    assert option_message(said, ["--x.lr", "x.lam"], ["Thing"], []) == shown


def test_a_constructor_s_error_is_dug_out() -> None:
    """jsonargparse tries the next type and reports that none fits, with the constructor's text inside."""
    constructors = Constructors()
    with pytest.raises(ValueError, match="invalid literal") as caught:
        constructors.build(int, "x")
    wrapped = TypeError(f"Does not validate against any of the Union subtypes\n  - {caught.value}\n  - Expected a list")
    assert constructors.cause(wrapped) is caught.value
    other = TypeError("another")
    assert constructors.cause(other) is other
