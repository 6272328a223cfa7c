"""What an evaluation leaves behind: `results.json`, transcripts, and nothing half-written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gigpo_lightning import __main__
from gigpo_lightning.callbacks.checkpoint import IterationCheckpoint
from gigpo_lightning.callbacks.evaluation_files import EvaluationFiles
from tests.callbacks.tiny import fit as tiny_fit
from tests.toy_run import fit, make_data, make_module, make_trainer


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


# -- inside the trainer's commands -------------------------------------------------------------------------------------


def test_test_writes_results_and_shows_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, epochs=2, callbacks=[IterationCheckpoint(), EvaluationFiles()])
    assert "results.json" not in files(tmp_path)
    written, module = EvaluationFiles(), make_module()
    trainer = make_trainer(tmp_path, callbacks=[written, IterationCheckpoint()])
    trainer.test(module, datamodule=make_data(), ckpt_path="last", weights_only=True)
    assert written.results == tmp_path / "results.json"
    content = json.loads(written.results.read_text())
    assert content["checkpoint"].endswith("iteration=000002.ckpt")
    assert content["iteration"] == 2
    assert content["tasks"] == "tests.toy_world.BoxTasks"
    assert content["results"] == module.results
    assert [(row["split"], row["mode"]) for row in content["results"]] == [
        (split, mode) for split in ("seen", "unseen") for mode in ("sampled", "greedy")
    ]
    said = capsys.readouterr().out
    assert said.count("Evaluation on fixed tasks") == 1
    assert "95 % interval" in said
    assert "Test metric" not in said  # Lightning's own table would say it twice


def test_validate_writes_results_and_a_validation_during_fit_does_not(tmp_path: Path) -> None:
    written = EvaluationFiles()
    fit(tmp_path, callbacks=[written], limit_val_batches=1)
    assert written.results is None
    assert "results.json" not in files(tmp_path)
    trainer = make_trainer(tmp_path, callbacks=[written], limit_val_batches=1)
    trainer.validate(make_module(), datamodule=make_data())
    (row,) = json.loads((tmp_path / "results.json").read_text())["results"]
    assert (row["split"], row["episodes"]) == ("unseen", 4)


def test_predict_writes_transcripts(tmp_path: Path) -> None:
    written = EvaluationFiles()
    make_trainer(tmp_path, callbacks=[written]).predict(make_module(), datamodule=make_data())
    names = [f"transcripts/all-unseen-{number:03d}-rank0.txt" for number in range(3)]
    assert files(tmp_path) == names
    assert [str(path.relative_to(tmp_path)) for path in written.transcripts] == names
    text = (tmp_path / names[1]).read_text(encoding="utf-8")
    assert text.startswith("task: take the ")
    assert "[unseen-1]" in text
    assert "you see 3 box ." in text
    assert "   1 > open box " in text
    assert text.endswith("turns]\n")


def test_another_folder(tmp_path: Path) -> None:
    written = EvaluationFiles(folder=str(tmp_path / "elsewhere"))
    make_trainer(tmp_path / "run", callbacks=[written]).test(make_module(), datamodule=make_data(), verbose=False)
    make_trainer(tmp_path / "run", callbacks=[written]).predict(make_module(), datamodule=make_data())
    assert files(tmp_path)[0] == "elsewhere/results.json"
    assert all(name.startswith("elsewhere/") for name in files(tmp_path))
    assert written.results is None  # of the latest command only
    assert len(written.transcripts) == 3


def test_a_module_without_results_leaves_no_file(tmp_path: Path) -> None:
    written = EvaluationFiles()
    tiny_fit(tmp_path, [written], [0.5], epochs=1, limit_val_batches=1)
    assert written.results is None
    assert files(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in ("file", "file/below"):
        written = EvaluationFiles(folder=str(tmp_path / folder))
        message = rf"EvaluationFiles\.folder=.*{folder}: .*file is not a folder"
        module, trainer = make_module(), make_trainer(tmp_path, callbacks=[written])
        for command in (trainer.test, trainer.predict, trainer.fit):  # a fit ends with a test
            with pytest.raises(ValueError, match=message):
                command(module, datamodule=make_data())
        assert not hasattr(module, "results") or not module.results  # nothing was played
    assert files(tmp_path) == ["file"]


# -- from the command line ---------------------------------------------------------------------------------------------

CONFIG = """
trainer: {accelerator: cpu, enable_model_summary: false, enable_progress_bar: false, logger: false}
data:
  tasks: {class_path: tests.toy_world.BoxTasks}
  evaluation: {tasks: 2, seeds: 1, greedy: false, predict_tasks: 2, splits: [seen]}
model:
  policy: {class_path: ScratchPolicy, init_args: {hidden_size: 16, layers: 1, heads: 2, kv_heads: 1}}
"""


def test_every_command_writes_and_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIGPO_RUN_PLACE", "")
    Path("boxes.yaml").write_text(CONFIG)
    for command, line in (
        ("test", "results:     runs/boxes/test_0/results.json"),
        ("validate", "results:     runs/boxes/validate_0/results.json"),
        ("predict", "transcripts: 2 in runs/boxes/predict_0/transcripts"),
    ):
        assert __main__.main([command, "--config=boxes.yaml"]) == 0
        assert line in capsys.readouterr().out.splitlines()
    # Listed by the user, it is not added a second time.
    callback = ["--trainer.callbacks+=EvaluationFiles", "--trainer.callbacks.folder=here"]
    assert __main__.main(["test", "--config=boxes.yaml", *callback]) == 0
    said = capsys.readouterr().out
    assert "results:     here/results.json" in said
    assert said.count("Evaluation on fixed tasks") == 1
    assert not Path("runs/boxes/test_1/results.json").exists()
