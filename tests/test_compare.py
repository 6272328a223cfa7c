"""`compare` as a whole: what every run is given, interruptions and failures, and what it refuses in an old folder.

Most runs are stand-ins (`fake_fit`); one test trains for real.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("scipy")

from gigpo_lightning import __main__
from gigpo_lightning.compare import command, runner
from gigpo_lightning.compare.folder import Run
from gigpo_lightning.compare.options import Options, parse
from gigpo_lightning.compare.settle import settle
from gigpo_lightning.compare.variants import Variant, collect
from gigpo_lightning.resources import shipped_files
from tests import cli_world

ROOT = Path(__file__).parents[1]
CONFIG = """
trainer:
  accelerator: cpu
  max_epochs: 2
  enable_model_summary: false
  callbacks:
    - class_path: Curriculum
      init_args: {curriculum: steps.yaml}
    - class_path: TensorBoardViews
    - class_path: IterationProgress
data:
  tasks: {class_path: tests.toy_world.BoxTasks}
  groups: 2
  members: 4
  minibatches: 1
  evaluation: {tasks: 3, seeds: 1, during_fit_tasks: 3, greedy: false}
model:
  policy:
    class_path: ScratchPolicy
    init_args: {hidden_size: 16, layers: 1, heads: 2, kv_heads: 1}
  kl_coef: 0.0
"""
CURRICULUM = """
stages:
  - {name: near, difficulty: {boxes: 2}, max_turns: 4, promote: 0.01, window: 1, min_iterations: 1}
  - {name: middle, difficulty: {boxes: 3}, max_turns: 4, promote: 0.01, window: 1, min_iterations: 1}
  - {name: far, difficulty: {boxes: 4}, max_turns: 5, promote: 0.01, window: 1, min_iterations: 1}
"""
VARIANTS = """
good: {label: the good one}
poor:
  label: the poor one
  options: [--data.credit.estimator=grpo]
  callbacks: {Curriculum: null, DirectTraining: {curriculum: steps.yaml}}
"""
LINE = ["--config=boxes.yaml", "--variants=v.yaml", "--seeds=2", "--out=out"]

_settled: dict[str, dict[str, Any]] = {}  # configurations are settled once for all tests: half a second each


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a configuration and two variants."""
    cli_world.enter(tmp_path, monkeypatch)
    Path("boxes.yaml").write_text(CONFIG)
    Path("steps.yaml").write_text(CURRICULUM)
    Path("v.yaml").write_text(VARIANTS)
    return tmp_path


@pytest.fixture
def behaviour(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the stand-ins of single runs do, by `variant seed`; the others are well."""
    chosen: dict[str, str] = {}

    def fake_command(run: Run, config: Any) -> list[str]:
        own = [run.variant, str(run.seed), chosen.get(f"{run.variant} {run.seed}", "good")]
        return [
            sys.executable,
            "-m",
            "tests.fake_fit",
            str(run.folder),
            *own,
            *(["--ckpt_path=last"] if run.begun else []),
        ]

    def remembered(variant: Variant, options: Options) -> dict[str, Any]:
        key = repr((variant, options.fit, options.budget, options.evaluate, options.checks))
        if key not in _settled:
            _settled[key] = settle(variant, options)
        return _settled[key]

    monkeypatch.setattr(command, "settle", remembered)
    monkeypatch.setattr(runner, "fit_command", fake_command)
    monkeypatch.setattr(runner, "_POLL_S", 0.02)
    return chosen


def compare(*args: str) -> int:
    return __main__.main(["compare", *LINE, *args])


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one message with which a command line is refused."""
    with pytest.raises(SystemExit) as end:
        compare(*args)
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1, said
    return said


def attempts(run: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(Path("out", run, "attempts.json").read_text())["attempts"]
    return found


def report() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("out/compare.json").read_text())
    return found


# -- what a run is given -----------------------------------------------------------------------------------------------


def settled(number: int, *args: str) -> dict[str, Any]:
    options = parse([*LINE, *args])
    return settle(collect(options.algorithms, options.variants)[number], options)


def callbacks(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {entry["class_path"].rsplit(".")[-1]: entry["init_args"] for entry in config["trainer"]["callbacks"]}


def test_a_budget_of_steps_takes_the_place_of_the_other_limits(folder: Path) -> None:
    config = settled(0, "--budget=1000steps", "--checks=4", "--trainer.max_time=00:00:10:00", "--data.groups=3")
    listed = callbacks(config)
    assert listed["StepBudget"]["env_steps"] == 1000 and listed["LearningCurve"]["every_env_steps"] == 250
    assert listed["Curriculum"] == {"curriculum": "steps.yaml", "start": 0, "stop_when_passed": False}
    assert listed["IterationCheckpoint"]["best_by"] is None
    # before those that use what others decide
    assert list(listed) == [
        *("Curriculum", "StepBudget", "LearningCurve", "IterationCheckpoint", "TensorBoardViews", "IterationProgress")
    ]
    trainer = config["trainer"]
    assert (trainer["max_epochs"], trainer["max_steps"], trainer["max_time"]) == (-1, -1, None)
    assert trainer["num_sanity_val_steps"] == -1 and config["data"]["groups"] == 3


def test_a_budget_of_time_and_none_at_all(folder: Path) -> None:
    config = settled(0, "--budget=20m", "--checks=5")
    assert config["trainer"]["max_time"] == "00:00:20:00" and callbacks(config)["LearningCurve"]["every_s"] == 240
    config = settled(0)
    assert config["trainer"]["max_epochs"] == 2 and callbacks(config)["StepBudget"]["env_steps"] is None
    assert callbacks(config)["Curriculum"]["stop_when_passed"] is True


def test_without_a_budget_the_configuration_s_own_holds(folder: Path) -> None:
    config = Path("boxes.yaml").read_text()
    own = "  callbacks:\n    - {class_path: StepBudget, init_args: {env_steps: 70}}\n"
    Path("boxes.yaml").write_text(config.replace("  callbacks:\n", own))
    assert callbacks(settled(0))["StepBudget"]["env_steps"] == 70
    assert callbacks(settled(0, "--budget=90steps"))["StepBudget"]["env_steps"] == 90
    assert callbacks(settled(0, "--budget=1m"))["StepBudget"]["env_steps"] is None


def test_all_variants_are_evaluated_on_the_same_stages(folder: Path) -> None:
    for number in (0, 1):
        evaluation = settled(number)["data"]["evaluation"]
        assert evaluation["stages"] == evaluation["during_fit_stages"] == ["near", "far"]
        assert evaluation["splits"] == ["unseen"]
        evaluation = settled(number, "--evaluate=middle")["data"]["evaluation"]
        assert evaluation["stages"] == evaluation["during_fit_stages"] == ["middle"]


def test_a_variant_changes_options_and_callbacks(folder: Path) -> None:
    config = settled(1)
    assert config["data"]["credit"]["estimator"] == "grpo"
    assert "Curriculum" not in callbacks(config)
    assert callbacks(config)["DirectTraining"] == {"curriculum": "steps.yaml", "stage": None}


@pytest.mark.parametrize("name", shipped_files("configs/ablations"))
def test_every_shipped_ablation_is_built(folder: Path, name: str) -> None:
    options = parse(["--config=alfworld.yaml", f"--variants={name}", "--budget=300ksteps", "--evaluate=two-objects"])
    configs = [settle(variant, options) for variant in collect((), options.variants)]
    assert all(config not in configs[:number] for number, config in enumerate(configs))  # no option is lost


def test_what_fit_would_refuse_is_refused_before_the_first_run(
    folder: Path, behaviour: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "variant good: unknown option --data.gruops; did you mean --data.groups?" in refusal(
        capsys, "--data.gruops=3"
    )
    assert "variant good: data.members=1: a group needs" in refusal(capsys, "--data.members=1")
    assert "--evaluate: there is no stage 'fra'; did you mean 'far'?" in refusal(capsys, "--evaluate=fra")
    Path("v.yaml").write_text("fine: {}\nbad: [--data.credit.norm=sdt]\n")
    assert "variant bad: data.credit.norm" in refusal(capsys)
    Path("v.yaml").write_text("bad: {callbacks: {Curiculum: {}}}\n")
    said = refusal(capsys)
    assert "variant bad: trainer.callbacks: unknown class Curiculum; did you mean Curriculum?" in said
    assert "gigpo-compare-" not in said  # a file that is gone
    Path("v.yaml").write_text("bad: {callbacks: {Curiculum: null}}\n")
    said = refusal(capsys)
    assert "variant bad: callbacks: Curiculum is to be left out, but is not in trainer.callbacks" in said
    assert "did you mean Curriculum?" in said
    Path("v.yaml").write_text("bad: [--data.credit.estimator=ppo]\n")
    assert "variant bad: data.credit.estimator=ppo needs a critic" in refusal(capsys)
    assert not Path("out").exists() and not Path("runs").exists()


def test_a_missing_package_is_named_before_anything_is_done(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert "compare needs scipy and matplotlib: pip install -c constraints.txt '.[compare]'" in refusal(capsys)


def test_a_dry_run_shows_the_commands_in_a_balanced_order(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare("--dry_run") == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("python -m")]
    assert [line.split("default_root_dir=")[1] for line in shown] == [
        *("out/good/seed_0", "out/poor/seed_0", "out/good/seed_1", "out/poor/seed_1")
    ]
    assert shown[3].startswith("python -m gigpo_lightning fit --config=out/poor/config.yaml ")
    assert "--seed_everything=1 --data.seed=1 --model.policy.init_args.init_seed=1 " in shown[3]
    assert not Path("out").exists()


# -- runs --------------------------------------------------------------------------------------------------------------


def test_finished_runs_are_reported_and_not_repeated(
    behaviour: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare("--jobs=2") == 0
    said = capsys.readouterr().out
    assert "[4/4]" in said and "near 0.60, far 0.60" in said
    found = report()
    assert [(run["variant"], run["seed"]) for run in found["runs"]] == [
        *(("good", 0), ("good", 1), ("poor", 0), ("poor", 1))
    ]
    assert found["missing"] == [] and found["labels"]["poor"] == "the poor one"
    assert found["stages"]["far"][1]["difference"]["mean"] == pytest.approx(-0.5)
    assert found["configs"]["poor"]["data"]["credit"]["estimator"] == "grpo" and found["machine"]["torch"]
    assert Path("out/compare.png").stat().st_size > 10_000 and "the command" not in Path("out/compare.md").read_text()
    assert compare("--seeds=3") == 0  # seeds may be added
    assert [len(attempts(f"good/seed_{seed}")) for seed in range(3)] == [1, 1, 1]
    assert {run["seed"] for run in report()["runs"]} == {0, 1, 2}
    assert compare("--seeds=1,2") == 0
    assert {run["seed"] for run in report()["runs"]} == {1, 2}
    spent = attempts("good/seed_0")[0]
    assert spent["exit_code"] == 0 and spent["seconds"] > 0 and spent["cpu_s"] > 0 and spent["code"]


def test_a_failed_run_is_shown_and_does_not_stop_the_others(
    behaviour: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    behaviour["good 0"] = "bad"
    assert compare() == 1
    said = capsys.readouterr().out
    assert "good seed 0: FAILED, exit code 3" in said and "    the end: out of luck" in said
    assert report()["missing"] == ["good seed 0"] and len(report()["runs"]) == 3
    assert "**not finished**: good seed 0" in Path("out/compare.md").read_text()
    behaviour.clear()  # mended: only that one is run again
    assert compare() == 0 and report()["missing"] == []
    assert [attempt["exit_code"] for attempt in attempts("good/seed_0")] == [3, 0]
    assert len(attempts("good/seed_1")) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_ends_the_runs_and_the_same_command_goes_on(
    behaviour: dict[str, str], number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    behaviour["poor 0"] = "slow"
    waiting = Path("out/poor/seed_0/checkpoints").absolute()
    when(waiting.exists, lambda: os.kill(os.getpid(), number))
    begun = time.monotonic()
    assert compare() == command.INTERRUPTED
    assert time.monotonic() - begun < 50  # the run would have waited for 60 s
    assert "interrupted: 3 of 4 runs are not finished; the same command goes on" in capsys.readouterr().out
    assert [run["variant"] for run in report()["runs"]] == ["good"]
    assert attempts("poor/seed_0")[0]["exit_code"] == -signal.SIGTERM
    assert not Path("out/good/seed_1").exists()  # nothing new was started
    assert compare() == 0
    assert "poor seed 0: resumed" in capsys.readouterr().out
    assert len(report()["runs"]) == 4 and len(attempts("poor/seed_0")) == 2
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def when(condition: Callable[[], bool], act: Callable[[], None]) -> None:
    """Act as soon as the condition holds, in a thread."""

    def wait() -> None:
        while not condition():
            time.sleep(0.02)
        act()

    threading.Thread(target=wait, daemon=True).start()


def test_a_process_that_was_killed_with_its_starter_counts_until_its_last_word(tmp_path: Path) -> None:
    run = Run("good", 0, tmp_path)
    run.begin()
    log = tmp_path / "fit.log"
    log.write_text("…")
    started = json.loads((tmp_path / "attempts.json").read_text())["attempts"][0]["started"]
    os.utime(log, (started + 90, started + 90))
    run.begin()
    assert run.attempts[0]["seconds"] == pytest.approx(90) and run.attempts[0]["exit_code"] is None


# -- an old folder -----------------------------------------------------------------------------------------------------


def test_other_options_are_refused_in_an_old_folder(
    behaviour: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare("--seeds=1") == 0
    capsys.readouterr()
    said = refusal(capsys, "--data.groups=3")
    assert "--out out holds a comparison with other options: good: data.groups: 2 there, 3 here" in said
    said = refusal(capsys, "--budget=100steps")
    assert "budget: the configuration's there, 100 environment steps here" in said
    said = refusal(capsys, "--evaluate=middle")
    assert "good: data.evaluation.stages: ['near', 'far'] there, ['middle'] here" in said
    Path("v.yaml").write_text(VARIANTS.replace("grpo", "step"))
    assert "poor: data.credit.estimator: grpo there, step here" in refusal(capsys)
    Path("v.yaml").write_text(VARIANTS + "third: [--data.members=2]\n")
    assert compare("--seeds=1") == 0  # variants may be added
    assert [row["variant"] for row in report()["cost"]] == ["good", "poor", "third"]


def test_other_code_is_refused_unless_it_is_accepted(
    behaviour: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare("--seeds=1") == 0
    monkeypatch.setattr(command, "code_digest", lambda: "0123456789ab")
    assert "there, 0123456789ab here" in (said := refusal(capsys)) and "--other_code goes on" in said
    assert compare("--other_code") == 0
    assert attempts("good/seed_1")[0]["code"] == "0123456789ab"


def test_no_run_is_started_with_code_that_changed_meanwhile(
    behaviour: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    digests = iter(["a", "a", "b"])
    monkeypatch.setattr(command, "code_digest", lambda: next(digests))
    assert compare() == command.INTERRUPTED
    assert "the code of gigpo_lightning has changed" in capsys.readouterr().out
    assert [run["variant"] for run in report()["runs"]] == ["good"]


def test_two_comparisons_never_share_a_folder(behaviour: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from gigpo_lightning.compare.folder import open_folder\n"
        "folder = open_folder(Path('out')); print('locked', flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as other:
        assert other.stdout is not None and other.stdout.readline() == b"locked\n"
        try:
            said = refusal(capsys)
            assert "--out out is in use: another process writes into it" in said and "another folder with --out" in said
        finally:
            other.kill()
    assert compare("--seeds=1") == 0


def test_a_folder_that_cannot_be_written_is_refused(
    behaviour: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").write_text("")
    assert "--out file/out: " in (said := refusal(capsys, "--out=file/out")) and "--runs_dir" not in said
    Path("mine").mkdir()
    Path("mine/poor").write_text("")
    assert "--out mine: its poor is no folder of runs" in refusal(capsys, "--out=mine")
    assert {path.name for path in Path("mine").iterdir()} <= {"poor", ".lock"}
    Path("run").mkdir()
    Path("run/results.json").write_text("{}")
    assert "--out run holds a finished run: fit with --ckpt_path last goes on with it" in refusal(capsys, "--out=run")


def test_a_report_alone_starts_nothing(behaviour: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert compare() == 0
    for name in ("json", "md", "png"):
        Path(f"out/compare.{name}").unlink()
    behaviour["good 0"] = "bad"
    assert __main__.main(["compare", "--report_only", "--out=out", "--threshold=0.3"]) == 0
    assert len(report()["runs"]) == 4 and report()["labels"] == {"good": "the good one", "poor": "the poor one"}
    assert "steps to 0.3" in Path("out/compare.md").read_text() and Path("out/compare.png").exists()
    with pytest.raises(SystemExit):
        __main__.main(["compare", "--report_only", "--out=nowhere"])
    assert "--out nowhere: there is no comparison in it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("plan.json", '{"code": 1', "out/plan.json is damaged"),
        ("plan.json", "[]", "out/plan.json: not a file of compare, it lacks command"),
        ("plan.json", '{"variants": {}}', "out/plan.json: not a file of compare, it lacks command"),
        ("good/seed_0/run.json", "", "out/good/seed_0/run.json is damaged"),
        ("good/seed_0/run.json", '{"variant": "good"}', "run.json: not a file of compare, it lacks seed"),
    ],
)
def test_a_damaged_file_is_named(
    behaviour: dict[str, str], file: str, content: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare("--seeds=1") == 0
    capsys.readouterr()
    Path("out", file).write_text(content)
    assert message in refusal(capsys, "--seeds=1")
    with pytest.raises(SystemExit) as end:
        __main__.main(["compare", "--report_only", "--out=out"])
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_other_folders_beside_the_runs_are_none(behaviour: dict[str, str]) -> None:
    assert compare("--seeds=1") == 0
    Path("out/good/seed_old").mkdir()
    assert __main__.main(["compare", "--report_only", "--out=out"]) == 0


# -- for real ----------------------------------------------------------------------------------------------------------


def test_a_comparison_for_real(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two variants side by side; the curriculum is passed at once, which does not end a run before its budget."""
    assert compare("--seeds=1", "--jobs=2", "--budget=150steps", "--checks=3") == 0, capsys.readouterr().out
    good, poor = report()["runs"]
    for run in (good, poor):
        steps = [point["env_steps"] for point in run["points"]]
        assert steps[0] == 0 and steps[-1] == run["env_steps"] and 150 <= run["env_steps"] < 150 + 8 * 5
        assert len(steps) == 4 and {row["stage"] for row in run["final"]} == {"near", "far"}
        assert run["peak_bytes"] > 50 * 2**20 and run["cpu_s"] > 0
        saved = yaml.safe_load(Path("out", run["variant"], "seed_0/config.yaml").read_text())
        assert saved["seed_everything"] == saved["data"]["seed"] == 0
    assert (good["stage"], poor["stage"], poor["points"][0]["stage"]) == ("far", "far", "far")
    assert good["points"][0]["success"] == poor["points"][0]["success"]  # the same policy, the same tasks
