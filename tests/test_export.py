"""`export` with files that do not fit: one message, and nothing is left of what was to be written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from gigpo_lightning.__main__ import main
from gigpo_lightning.callbacks.checkpoint import IterationCheckpoint
from gigpo_lightning.policy.causal_lm import CausalLMPolicy, LoRA
from tests.tiny_lm import CHAT, save_tiny
from tests.toy_run import fit


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of the box world."""
    root = tmp_path_factory.mktemp("export")
    run = root / "version_0"
    source = save_tiny(root / "tiny")
    fit(run, 1, [IterationCheckpoint()], model={"policy": CausalLMPolicy(source, chat=CHAT, lora=LoRA(r=4))})
    options = {"model": source, "lora": {"r": 4}, "chat": {"system": CHAT.system, "first": CHAT.first}}
    policy = {"class_path": "gigpo_lightning.policy.causal_lm.CausalLMPolicy", "init_args": options}
    (run / "config.yaml").write_text(yaml.safe_dump({"model": {"policy": policy}}))
    return run


def refused(capsys: pytest.CaptureFixture[str], checkpoint: Path, target: Path, *more: str) -> str:
    """The message, checked to be one line that leaves nothing behind."""
    before = sorted(target.parent.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        main(["export", "--ckpt_path", str(checkpoint), "--to", str(target), *more])
    assert ended.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert sorted(target.parent.rglob("*")) == before
    return lines[0]


def without_weight(state: dict[str, Any]) -> Any:
    del state["state_dict"][next(iter(state["state_dict"]))]
    return state


def with_nan(state: dict[str, Any]) -> Any:
    state["state_dict"][next(iter(state["state_dict"]))].fill_(float("nan"))
    return state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_weight, "its weights are of another model: Missing key(s) in state_dict"),
        (with_nan, "is not finite; take an earlier one"),
        (lambda state: {"state_dict": state["state_dict"]}, "not a checkpoint of gigpo_lightning: it lacks policy_id"),
        (lambda state: [1, 2], "not a checkpoint of gigpo_lightning: it lacks state_dict, policy_identity"),
    ],
)
def test_checkpoints_that_do_not_fit(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Any], Any], message: str
) -> None:
    state = torch.load(run / "checkpoints" / "iteration=000001.ckpt", weights_only=True)
    torch.save(change(state), tmp_path / "changed.ckpt")
    config = ["--config", str(run / "config.yaml")]
    assert message in refused(capsys, tmp_path / "changed.ckpt", tmp_path / "a" / "new", *config)


@pytest.mark.parametrize("content", [b"", b"garbage", None])
def test_files_that_are_no_whole_checkpoint(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    whole = (run / "checkpoints" / "iteration=000001.ckpt").read_bytes()
    (tmp_path / "x.ckpt").write_bytes(whole[: len(whole) // 2] if content is None else content)
    text = refused(capsys, tmp_path / "x.ckpt", tmp_path / "new", "--config", str(run / "config.yaml"))
    assert "x.ckpt: not a whole checkpoint: " in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "c.yaml: cannot be read: No such file"),
        ("", "c.yaml: expected `key: value` lines, but the file is empty"),
        ("a: [1", "c.yaml: not readable as YAML: line 1"),
        ("model: abc", "c.yaml: it has no model.policy"),
        ("model: {policy: {class_path: CausalLMPolcy}}", "unknown class CausalLMPolcy; did you mean CausalLMPolicy?"),
        ("model: {policy: {class_path: CausalLMPolicy, init_args: {modell: x}}}", "c.yaml: unknown key modell"),
    ],
)
def test_configurations_that_do_not_fit(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "c.yaml").write_text(content)
    checkpoint = run / "checkpoints" / "iteration=000001.ckpt"
    assert message in refused(capsys, checkpoint, tmp_path / "new", "--config", str(tmp_path / "c.yaml"))


def test_folders_that_cannot_be_written(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = run / "checkpoints" / "iteration=000001.ckpt"
    (tmp_path / "file").write_text("mine")
    assert "it is not a folder; name a new one" in refused(capsys, checkpoint, tmp_path / "file")
    assert "cannot be written: Not a directory" in refused(capsys, checkpoint, tmp_path / "file" / "new")


def test_an_export_that_fails_in_the_middle_leaves_nothing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(policy: CausalLMPolicy, folder: Path) -> None:
        (folder / "config.json").write_text("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CausalLMPolicy, "save_merged", half)
    checkpoint = run / "checkpoints" / "iteration=000001.ckpt"
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "a" / "new", tmp_path / "empty"):
        assert "No space left on device" in refused(capsys, checkpoint, target, "--merged")


def test_an_empty_folder_is_filled(run: Path, tmp_path: Path) -> None:
    assert (
        main(["export", "--ckpt_path", str(run / "checkpoints" / "iteration=000001.ckpt"), "--to", str(tmp_path)]) == 0
    )
    assert (tmp_path / "adapter_model.safetensors").is_file()
    assert not (tmp_path / ".partial").exists()
    assert not (tmp_path / "README.md").exists()  # peft's card, with nothing in it but fields to fill
    usual = tmp_path.parent / "usual"
    usual.write_text("")
    assert {path.stat().st_mode for path in tmp_path.iterdir()} == {usual.stat().st_mode}


@pytest.mark.parametrize("name", ["best", "last"])
def test_best_and_last_mean_what_they_mean_for_fit(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(run.parent)
    assert main(["export", "--config", "mine.yaml", "--ckpt_path", name, "--to", "new"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("adapter: new, of ") and said.endswith("version_0/checkpoints/iteration=000001.ckpt\n")
    assert Path("new/adapter_model.safetensors").is_file()
    assert "of which run? Give the --config of its fit" in refused(capsys, Path(name), tmp_path / "other")
    missing = refused(capsys, Path(name), tmp_path / "other", "--config", "yours.yaml")
    assert "there is no run in runs/yours yet" in missing
