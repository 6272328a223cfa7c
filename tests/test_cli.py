"""The command line: which file a name means, where a run is kept, what `last` continues, what the commands do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import Timer

from gigpo_lightning import __main__, __version__, cli_run, resources
from gigpo_lightning.cli import GiGPOCLI
from gigpo_lightning.cli_checks import check_options
from gigpo_lightning.cli_config import resolve_configs, run_name
from gigpo_lightning.cli_place import Place, agreed_place
from gigpo_lightning.resources import find_file, shipped_dir, shipped_files
from tests.cli_world import QUIET, LineData, LineModule, enter, run_line


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test runs in an empty folder and leaves nothing behind in the environment."""
    return enter(tmp_path, monkeypatch)


def line(command: str, *args: str, epochs: int | None = None) -> GiGPOCLI:
    """Run a command on the small module, without a logger."""
    return run_line(command, "--trainer.logger=false", *args, epochs=epochs)


def refused(capsys: pytest.CaptureFixture[str], call: Sequence[str]) -> str:
    """The message with which `python -m gigpo_lightning CALL` is refused."""
    with pytest.raises(SystemExit) as end:
        __main__.main(call)
    assert end.value.code == 2
    return capsys.readouterr().err


# -- names of configurations -------------------------------------------------------------------------------------------


def test_a_file_in_the_working_folder_comes_before_the_shipped_one(own_folder: Path) -> None:
    assert resolve_configs(["--config", "alfworld.yaml"])[1] == [shipped_dir("configs") / "alfworld.yaml"]
    Path("alfworld.yaml").write_text("seed_everything: 3\n")
    args, paths = resolve_configs(["--data.lam=1", "--config", "alfworld.yaml", "--x"])
    assert args == ["--data.lam=1", "--config", "alfworld.yaml", "--x"]
    assert [path.absolute() for path in paths] == [own_folder / "alfworld.yaml"]


def test_the_ending_can_be_left_out_and_the_order_is_kept(own_folder: Path) -> None:
    Path("mine.yaml").write_text("seed_everything: 3\n")
    args, paths = resolve_configs(["--config=alfworld", "-c", "mine"])
    assert [path.name for path in paths] == ["alfworld.yaml", "mine.yaml"]
    assert args == ["--config", str(paths[0]), "--config", "mine.yaml"]


def test_shipped_files_are_found_in_subfolders(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = own_folder / "site" / "gigpo_lightning"
    (package / "configs" / "policy").mkdir(parents=True)
    (package / "configs" / "policy" / "small.yaml").write_text("{}\n")
    monkeypatch.setattr(resources, "_PACKAGE", package)
    assert shipped_files("configs") == ["policy/small.yaml"]
    assert find_file("configs", "policy/small") == package / "configs" / "policy" / "small.yaml"


def test_a_curriculum_is_not_mistaken_for_a_configuration_of_its_name(own_folder: Path) -> None:
    Path("alfworld.yaml").write_text("seed_everything: 3\n")  # a copy of the configuration, to change it
    assert find_file("curricula", "curricula/alfworld.yaml") == shipped_dir("curricula") / "alfworld.yaml"
    Path("curricula").mkdir()
    Path("curricula/alfworld.yaml").write_text("stages: []\n")
    assert find_file("curricula", "curricula/alfworld") == Path("curricula/alfworld.yaml")


def test_folders_beside_an_installed_package_are_not_taken_for_ours(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own_folder / "site" / "gigpo_lightning").mkdir(parents=True)
    (own_folder / "site" / "configs").mkdir()  # another package's
    monkeypatch.setattr(resources, "_PACKAGE", own_folder / "site" / "gigpo_lightning")
    with pytest.raises(FileNotFoundError, match="configs/ is missing"):
        shipped_dir("configs")


def test_an_unknown_name_lists_the_shipped_ones(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, ["fit", "--config", "alfwrld"])
    assert message.startswith("error: --config alfwrld")
    assert "did you mean alfworld.yaml?" in message
    assert all(name in message for name in shipped_files("configs"))


def test_a_config_without_a_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "name of a file is missing" in refused(capsys, ["fit", "--config"])
    assert "name of a file is missing" in refused(capsys, ["fit", "--config", "--data.lam=1"])


def test_the_run_is_named_by_its_first_file() -> None:
    assert run_name([Path("a/b/mine.yaml"), Path("other.yaml")]) == "mine"
    assert run_name([]) == "default"
    # the configuration that a run leaves behind stands for that run
    assert run_name([Path("runs/mine/version_3/config.yaml")]) == "mine"


def test_several_files_overlay_in_order_and_options_come_last(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("one.yaml").write_text("model: {width: 5}\ndata: {width: 5}\nseed_everything: 8\n")
    Path("two.yaml").write_text("model: {width: 6}\n")
    with pytest.raises(SystemExit) as end:
        line("fit", "--config", "one.yaml", "--config", "two.yaml", "--data.width", "7", "--print_config")
    assert end.value.code == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["seed_everything"], shown["model"]["width"], shown["data"]["width"]) == (8, 6, 7)
    assert not Path("runs").exists()


@pytest.mark.parametrize("name", shipped_files("configs"))
def test_every_shipped_configuration_builds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # An overlay in a subfolder changes parts of a whole configuration, that of a prompt with a pretrained policy.
    base = ["--config", "alfworld.yaml"] if "/" in name else []
    base += ["--config", "policy/qwen2.5-1.5b-lora.yaml"] if name.startswith("prompt/") else []
    monkeypatch.setattr(GiGPOCLI, "_run_subcommand", lambda self, command: None)
    cli = GiGPOCLI("fit", [*base, "--config", name])
    written = yaml.safe_load((shipped_dir("configs") / name).read_text())
    assert type(cli.datamodule).__name__ == "RolloutDataModule"
    for key, value in written.get("data", {}).items():
        if isinstance(value, (int, float, str)):
            assert getattr(cli.datamodule, key) == value
    for entry in written.get("trainer", {}).get("callbacks", []):
        kinds = [type(callback).__name__ for callback in cli.trainer.callbacks]
        assert entry["class_path"].rsplit(".")[-1] in kinds


# -- run folders -------------------------------------------------------------------------------------------------------


def test_every_fit_gets_its_own_folder(own_folder: Path) -> None:
    for number in range(2):
        cli = line("fit", epochs=1)
        folder = Path("runs/default") / f"version_{number}"
        assert Path(cli.trainer.default_root_dir) == folder
        assert len(list((folder / "checkpoints").glob("*.ckpt"))) == 1
    assert sorted(path.name for path in Path("runs/default").iterdir()) == ["version_0", "version_1"]


def test_a_folder_is_claimed_by_making_it(own_folder: Path) -> None:
    first, second = cli_run.claim(own_folder / "runs", "version"), cli_run.claim(own_folder / "runs", "version")
    assert [first.path.name, second.path.name] == ["version_0", "version_1"]
    second.discard()
    first.discard()
    assert list(own_folder.iterdir()) == []  # runs/ had been made for them


def test_a_folder_with_anything_of_worth_is_never_discarded(own_folder: Path) -> None:
    folder = cli_run.claim(own_folder / "runs", "version")
    (folder.path / "checkpoints").mkdir()
    (folder.path / "checkpoints" / "iteration=000001.ckpt").write_bytes(b"x")
    (folder.path / "config.yaml").write_text("{}")
    folder.discard()
    assert (folder.path / "config.yaml").is_file()


def test_a_process_of_a_further_device_shares_folder_and_checkpoint(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning starts it with the environment of the first, which has decided."""
    first = agreed_place(lambda: Place(cli_run.claim(own_folder / "runs", "version"), "some.ckpt"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    second = agreed_place(lambda: pytest.fail("it must not decide"))
    assert (second.folder.path, second.checkpoint) == (first.folder.path, "some.ckpt")
    second.folder.discard()  # that is for the first to do
    assert first.folder.path.is_dir()
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(OSError, match="full"):
        agreed_place(refuse)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as end:  # without a message: the first has given one
        agreed_place(lambda: pytest.fail("it must not decide"))
    assert end.value.code == 2


def refuse() -> Place:
    raise OSError("the disk is full")


def test_a_further_process_that_nobody_told_anything_says_how_to_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_RANK", "1")
    with pytest.raises(ValueError, match=r"NODE_RANK=1: this is not the first .* torchrun or srun"):
        agreed_place(refuse)


def test_the_folder_holds_what_is_needed_to_repeat_the_run(own_folder: Path) -> None:
    Path("mine.yaml").write_text("model: {width: 4}\n")
    GiGPOCLI("fit", [*QUIET, "--trainer.max_epochs=1", "--config=mine"], LineModule, LineData)
    folder = Path("runs/mine/version_0")
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved["model"]["width"] == 4
    assert saved["trainer"]["default_root_dir"] is None  # a repetition gets a folder of its own
    assert list(folder.glob("events.out.tfevents.*"))


def test_runs_dir_and_an_explicit_folder(own_folder: Path) -> None:
    line("fit", "--runs_dir=elsewhere", epochs=1)
    assert Path("elsewhere/default/version_0/checkpoints").is_dir()
    line("fit", "--trainer.default_root_dir=exactly/here", epochs=1)
    assert Path("exactly/here/checkpoints").is_dir()


# -- continuing --------------------------------------------------------------------------------------------------------


def save(cli: GiGPOCLI, number: int, folder: str = "runs/default/version_0/checkpoints") -> Path:
    """A checkpoint of the trained module under the name that the trainer's callback gives."""
    path = Path(folder) / f"iteration={number:06d}.ckpt"
    cli.trainer.save_checkpoint(path)
    return path


def test_last_continues_the_newest_run_in_its_folder(own_folder: Path) -> None:
    cli = line("fit", epochs=1)
    save(cli, 1)
    again = line("fit", "--ckpt_path=last", epochs=3)
    assert Path(again.trainer.default_root_dir) == Path("runs/default/version_0")
    assert again.trainer.global_step == 6  # 3 epochs of 2 steps in all: 2 came from the checkpoint
    assert again.config["fit"]["ckpt_path"] is None  # the saved configuration starts a run anew
    assert [path.name for path in Path("runs/default").iterdir()] == ["version_0"]


def test_last_passes_over_a_damaged_checkpoint(own_folder: Path, recwarn: pytest.WarningsRecorder) -> None:
    cli = line("fit", epochs=1)
    save(cli, 1)
    newest = save(cli, 2)
    content = newest.read_bytes()
    newest.write_bytes(content[: len(content) // 2])
    again = line("fit", "--ckpt_path=last", epochs=2)
    assert str(again.place.checkpoint).endswith("iteration=000001.ckpt")
    assert any("iteration=000002.ckpt is passed over" in str(warning.message) for warning in recwarn)


def test_last_without_any_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        line("fit", "--ckpt_path=last", epochs=1)
    assert end.value.code == 2
    assert "there is no run in runs/default yet" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_run_killed_in_its_first_iteration_starts_again_in_its_folder(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path("runs/default/version_0/checkpoints")
    folder.mkdir(parents=True)
    (folder / "iteration=000001.ckpt").write_bytes(b"half")
    with pytest.warns(UserWarning, match="passed over"):
        cli = line("fit", "--ckpt_path=last", epochs=1)
    assert cli.trainer.global_step == 2
    assert cli.place.folder.path == Path("runs/default/version_0")
    assert "starts again from its beginning" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.*passed over")
def test_a_run_that_lost_all_its_checkpoints_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("runs/default/version_0/checkpoints")
    folder.mkdir(parents=True)
    for number in (1, 2):
        (folder / f"iteration={number:06d}.ckpt").write_bytes(b"half")
    with pytest.raises(SystemExit):
        line("fit", "--ckpt_path=last", epochs=1)
    assert "no whole checkpoint in runs/default/version_0/checkpoints" in capsys.readouterr().err


def test_best_is_the_run_s_own_link(own_folder: Path) -> None:
    cli = line("fit", epochs=1)
    save(cli, 1)
    save(cli, 2)
    Path("runs/default/version_0/checkpoints/best.ckpt").symlink_to("iteration=000001.ckpt")
    assert str(line("test", "--ckpt_path=best").place.checkpoint).endswith("iteration=000001.ckpt")
    assert str(line("test", "--ckpt_path=last").place.checkpoint).endswith("iteration=000002.ckpt")


def test_checkpoints_are_read_as_data_only(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pickle that would run code is not even opened."""
    touched = own_folder / "touched"

    class Attack:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(touched),)

    torch.save({"state_dict": {}, "attack": Attack()}, "attack.ckpt")
    with pytest.raises(SystemExit) as end:
        line("test", "--ckpt_path=attack.ckpt")
    assert end.value.code == 2
    assert not touched.exists()
    assert "not a whole checkpoint" in capsys.readouterr().err


def test_a_checkpoint_alone_brings_the_configuration_of_its_run(own_folder: Path) -> None:
    Path("wide.yaml").write_text("model: {width: 6}\ndata: {width: 6}\n")
    path = save(line("fit", "--config=wide.yaml", epochs=1), 1, "runs/wide/version_0/checkpoints")
    Path("wide.yaml").unlink()
    cli = line("test", f"--ckpt_path={path}")
    assert cli.model.width == 6
    assert cli.place.folder.path.parts[-3:] == ("wide", "version_0", "test_0")
    assert line("test", "--ckpt_path", str(path), "--seed_everything=3").config["test"]["seed_everything"] == 3


# -- commands ----------------------------------------------------------------------------------------------------------


def test_fit_is_followed_by_the_evaluation_and_says_where_things_are(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli = line("fit", epochs=1)
    assert "test/loss" in cli.trainer.callback_metrics
    said = capsys.readouterr().out
    assert re.search(r"checkpoint: +\S*runs/default/version_0/checkpoints/\S+\.ckpt", said)
    assert "tensorboard --logdir runs/default/version_0" in said
    assert "results:     none were written" in said  # the small module writes none


def test_the_time_limit_ends_a_run_at_the_end_of_an_iteration() -> None:
    cli = line("fit", "--trainer.max_time=00:00:00:01", epochs=100_000)
    assert 0 < cli.trainer.current_epoch < 100_000
    assert cli.trainer.global_step == 2 * cli.trainer.current_epoch  # the datamodule has two batches
    timers = [callback for callback in cli.trainer.callbacks if isinstance(callback, Timer)]  # type: ignore[attr-defined]
    assert [timer._interval for timer in timers] == ["epoch"]


def test_two_limits_of_time_are_refused() -> None:
    with pytest.raises(ValueError, match=r"trainer\.max_time=00:01:00:00: trainer\.callbacks has a Timer, too"):
        check_options({"max_time": "00:01:00:00"}, [Timer("00:00:30:00")])


def test_other_commands_write_beside_the_checkpoint_they_use(own_folder: Path) -> None:
    cli = line("fit", epochs=1)
    save(cli, 1)
    for number in range(2):
        assert line("test", "--ckpt_path=last").place.folder.path.parts[-3:] == (
            "default",
            "version_0",
            f"test_{number}",
        )
    moved = save(cli, 1, folder="moved")
    assert line("test", f"--ckpt_path={moved}").place.folder.path == Path("runs/default/test_0")


def test_an_evaluation_of_the_untrained_policy_says_so(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli = line("fit", epochs=1)
    assert "warning" not in capsys.readouterr().err
    line("test")
    said = capsys.readouterr().err
    assert "warning: test without --ckpt_path plays the policy as it is before any training; --ckpt_path best" in said
    save(cli, 1)
    line("test", "--ckpt_path=last")
    assert "warning: test" not in capsys.readouterr().err


def test_help_and_version_load_nothing_heavy() -> None:
    code = (
        "import sys\nfrom gigpo_lightning.__main__ import main\n"
        "main(['--help']); main(['--version'])\nassert not {'torch', 'lightning', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__main__.__file__).parent.parent,
    )
    assert done.returncode == 0, done.stderr
    assert f"gigpo_lightning {__version__}" in done.stdout
    assert all(name in done.stdout for name in ("fit", "validate", "test", "predict", "check-env", "make-games"))


@pytest.mark.parametrize("command", ["fit", "test"])
def test_help_describes_every_option_of_ours_once(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        GiGPOCLI(command, ["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    described: dict[str, list[str]] = {}
    for entry in re.split(r"^  (?=-)", text, flags=re.MULTILINE):
        name = re.match(r"--((?:model|data|runs_dir)[\w.]*)", entry)
        if name and not re.match(r"--\S+\.help", entry) and "CONFIG" not in entry.split("\n")[0]:
            described.setdefault(name[1], []).append(" ".join(entry.split()[2:]))
    assert {"data.groups", "data.lam", "model.clip_low", "runs_dir"} <= set(described)
    assert {name for name, texts in described.items() if len(texts) > 1} == set()
    without = {name for name, texts in described.items() if not re.search(r"[A-Za-zλε`]", texts[0].partition("(")[0])}
    assert without == set()


def test_an_unknown_command_names_the_likely_one(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, ["fti"])
    assert "did you mean fit?" in message
    assert "check-env" in message


@pytest.mark.parametrize(("call", "rest"), [(["alfworld", "--data", "X"], ["--data", "X"]), (["--data", "X"], None)])
def test_world_commands_get_the_rest_of_the_line(
    call: list[str], rest: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    def run_check(argv: list[str]) -> int:
        seen.append(argv)
        return 1

    monkeypatch.setattr("gigpo_lightning.envs.alfworld.check.run_check", run_check)
    assert __main__.main(["check-env", *call]) == 1
    assert seen == [rest or call]


def test_world_commands_refuse_bad_input_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "did you mean alfworld?" in refused(capsys, ["make-games", "alfwrld"])

    def run_make(argv: list[str]) -> int:
        raise ValueError("--count 0: must be at least 1")

    monkeypatch.setattr("gigpo_lightning.envs.alfworld.files.run_make", run_make)
    assert refused(capsys, ["make-games", "--count", "0"]) == "error: --count 0: must be at least 1\n"


def test_the_command_of_the_readme_trains_and_evaluates(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`fit --config alfworld.yaml`, cut down to one iteration of two groups."""
    small = ["--trainer.max_epochs=1", "--data.groups=2", "--data.evaluation.tasks=2", "--data.evaluation.seeds=1"]
    assert __main__.main(["fit", "--config", "alfworld.yaml", *small]) == 0
    folder = Path("runs/alfworld/version_0")
    assert (folder / "checkpoints" / "iteration=000001.ckpt").is_file()
    assert list(folder.glob("events.out.tfevents.*"))
    assert json.loads((folder / "results.json").read_text())
    said = capsys.readouterr().out
    assert re.search(r"checkpoint: +\S*iteration=000001.ckpt", said)
    assert "results:     runs/alfworld/version_0/results.json" in said


def test_a_run_that_is_told_to_end_does_not_look_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM is what SLURM and container engines send; 128 + 15 is what shells call it."""
    enter(tmp_path, monkeypatch)
    with pytest.raises(SystemExit) as end:
        run_line("fit", "--model.fault=end", epochs=3)
    assert end.value.code == 143
