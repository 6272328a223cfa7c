"""Checkpoints: which are kept, and what a kill, a full disk or a damaged file leaves."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from gigpo_lightning.callbacks import checkpoint, durable
from gigpo_lightning.callbacks.checkpoint import IterationCheckpoint, best_of, kept
from gigpo_lightning.callbacks.curriculum import Curriculum
from gigpo_lightning.callbacks.durable import DurableCheckpointIO, newest_complete
from tests.callbacks.tiny import fit

ROOT = Path(__file__).parents[2]


class Kill(BaseException):
    """Ends a run as a kill does: no handler of ours may see it."""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_last": 0}, "IterationCheckpoint.keep_last=0: must be ≥ 1"),
        ({"keep_best": -1}, "IterationCheckpoint.keep_best=-1: must be ≥ 0"),
    ],
)
def test_a_bad_option_is_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        IterationCheckpoint(**options)


def test_kept_by_hand() -> None:
    scores = {"1": [0.0, 0.9], "2": [1.0, 0.2], "3": [1.0, 0.4], "4": [], "5": [1.0, 0.4], "6": [1.0, 0.1]}
    assert kept(scores, 1, 0) == ["6"]
    assert kept(scores, 1, 1) == ["5", "6"]  # stage before figure, and of two equals the later
    assert kept(scores, 2, 2) == ["3", "5", "6"]
    assert kept(scores, 1, 9) == ["1", "2", "3", "5", "6"]  # 4 has no figure: never among the best
    assert best_of(scores) == "5"
    assert best_of({"1": []}) is None


def test_in_a_fit_the_last_few_and_the_best_stay(tmp_path: Path) -> None:
    rates = [0.1, 0.9, 0.2, 0.3, 0.4, 0.5]
    trainer, _, _ = fit(tmp_path, [IterationCheckpoint(keep_last=2)], rates, epochs=6)
    folder = tmp_path / "checkpoints"
    numbered = [f"iteration={number:06d}.ckpt" for number in (2, 5, 6)]
    assert names(folder) == ["best.ckpt", *numbered, "last.ckpt"]
    assert (folder / "last.ckpt").resolve() == newest_complete(folder) == (folder / numbered[2]).resolve()
    assert (folder / "best.ckpt").resolve().name == numbered[0]
    assert Path(trainer.checkpoint_callback.best_model_path).name == numbered[0]
    assert torch.load(folder / "last.ckpt", weights_only=True)["epoch"] == 5


def test_a_later_stage_beats_a_better_rate(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text("stages: [{name: a, window: 1, min_iterations: 1}, {name: b}]")
    fit(tmp_path, [Curriculum(str(path)), IterationCheckpoint(keep_last=1)], [0.9, 0.2, 0.1], epochs=3)
    assert (tmp_path / "checkpoints/best.ckpt").resolve().name == "iteration=000002.ckpt"


def test_a_missing_figure_is_named_and_the_last_still_stay(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="best_by is 'val/x', which this iteration lacks; it has .*rollout/success"):
        fit(tmp_path, [IterationCheckpoint(keep_last=1, best_by="val/x")], [0.5], epochs=2)
    assert (tmp_path / "checkpoints/best.ckpt").resolve().name == "iteration=000002.ckpt"


@pytest.mark.parametrize("cut", [1, 3])
def test_resume_equals_uninterrupted(tmp_path: Path, cut: int) -> None:
    rates = [0.1, 0.9, 0.2, 0.3, 0.4]
    _, whole, _ = fit(tmp_path / "a", [IterationCheckpoint(keep_last=1)], rates, epochs=5)
    fit(tmp_path / "b", [IterationCheckpoint(keep_last=1)], rates, epochs=cut)
    _, resumed, data = fit(tmp_path / "b", [IterationCheckpoint(keep_last=1)], rates, epochs=5, ckpt_path="last")
    assert [entry["iteration"] for entry in data.seen] == list(range(cut, 5))
    assert resumed.layer.weight.equal(whole.layer.weight)
    assert names(tmp_path / "a/checkpoints") == names(tmp_path / "b/checkpoints")
    one, two = (torch.load(tmp_path / run / "checkpoints/last.ckpt", weights_only=True) for run in "ab")
    assert one["callbacks"] == two["callbacks"]
    assert one["epoch"] == two["epoch"]


def test_going_back_keeps_the_other_branch_until_it_is_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    fit(tmp_path, [IterationCheckpoint(keep_last=4)], [0.5], epochs=4)
    back = folder / "iteration=000002.ckpt"
    fit(tmp_path, [IterationCheckpoint(keep_last=4)], [0.5], epochs=3, ckpt_path=str(back))
    assert "iteration=000004.ckpt" in names(folder)
    assert newest_complete(folder) == (folder / "iteration=000003.ckpt").resolve()  # what last.ckpt says


def test_a_resume_with_nothing_left_to_do_knows_the_best(tmp_path: Path) -> None:
    """What is evaluated after the fit: without it, a finished run's results would become those of its last weights."""
    rates = [0.1, 0.9, 0.2]
    fit(tmp_path, [IterationCheckpoint()], rates, epochs=3)
    trainer, module, _ = fit(tmp_path, [IterationCheckpoint()], rates, epochs=3, ckpt_path="last")
    assert module.steps == 0
    assert Path(trainer.checkpoint_callback.best_model_path).name == "iteration=000002.ckpt"
    assert Path(trainer.checkpoint_callback.last_model_path).name == "iteration=000003.ckpt"


def test_a_run_from_scratch_moves_the_earlier_one_aside(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    fit(tmp_path, [IterationCheckpoint()], [0.5], epochs=3)
    fit(tmp_path, [IterationCheckpoint()], [0.5], epochs=1)
    fit(tmp_path, [IterationCheckpoint()], [0.5], epochs=1)
    assert names(folder) == ["best.ckpt", "earlier-1", "earlier-2", "iteration=000001.ckpt", "last.ckpt"]
    assert newest_complete(folder / "earlier-1") == (folder / "earlier-1/iteration=000003.ckpt").resolve()


def test_last_without_any_checkpoint_starts_from_scratch(tmp_path: Path) -> None:
    _, _, data = fit(tmp_path, [IterationCheckpoint()], [0.5], epochs=1, ckpt_path="last")
    assert [entry["iteration"] for entry in data.seen] == [0]


def test_an_iteration_that_is_cut_short_is_not_saved_but_repeated(tmp_path: Path) -> None:
    class OutOfTime(Callback):
        """As `trainer.max_time` does: stop at the end of a batch, here the first of two in the third iteration."""

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.should_stop = trainer.datamodule.iteration == 3

    _, whole, _ = fit(tmp_path / "a", [IterationCheckpoint()], [0.5], epochs=4)
    _, cut, _ = fit(tmp_path / "b", [OutOfTime(), IterationCheckpoint()], [0.5], epochs=4)
    assert cut.steps == 5
    assert (tmp_path / "b/checkpoints/last.ckpt").resolve().name == "iteration=000002.ckpt"
    _, resumed, _ = fit(tmp_path / "b", [IterationCheckpoint()], [0.5], epochs=4, ckpt_path="last")
    assert resumed.layer.weight.equal(whole.layer.weight)


def test_killed_for_real_while_writing(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from pathlib import Path
import torch
from gigpo_lightning.callbacks import durable
from gigpo_lightning.callbacks.checkpoint import IterationCheckpoint
from tests.callbacks.tiny import fit

save, calls = torch.save, []
def save_and_die(checkpoint, file):
    calls.append(1)
    if len(calls) < 3:
        return save(checkpoint, file)
    save(checkpoint, sys.argv[1] + "/whole")
    data = Path(sys.argv[1], "whole").read_bytes()
    file.write(data[: len(data) // 2])
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
durable.torch.save = save_and_die
fit(Path(sys.argv[1]), [IterationCheckpoint()], [0.5], epochs=5)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], env=environment, capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    folder = tmp_path / "checkpoints"
    assert ".iteration=000003.ckpt.partial" in names(folder)
    assert newest_complete(folder) == (folder / "iteration=000002.ckpt").resolve()
    _, resumed, data = fit(tmp_path, [IterationCheckpoint()], [0.5], epochs=5, ckpt_path="last")
    assert [entry["iteration"] for entry in data.seen] == [2, 3, 4]
    _, whole, _ = fit(tmp_path / "b", [IterationCheckpoint()], [0.5], epochs=5)
    assert resumed.layer.weight.equal(whole.layer.weight)
    assert not any(name.endswith(".partial") for name in names(folder))


@pytest.mark.parametrize(
    ("module", "name"), [(checkpoint, "link"), (checkpoint, "remove_partial"), (durable, "_sync_folder")]
)
def test_killed_between_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    """Wherever the third iteration's saving stops, what is left can be resumed and gives the uninterrupted weights."""
    _, whole, _ = fit(tmp_path / "a", [IterationCheckpoint(keep_last=1)], [0.5], epochs=4)
    folder = tmp_path / "b/checkpoints"

    def maybe_kill(*arguments: Any) -> None:
        if (folder / "iteration=000003.ckpt").exists():
            raise Kill
        original(*arguments)

    original = getattr(module, name)
    monkeypatch.setattr(module, name, maybe_kill)
    with pytest.raises(Kill):
        fit(tmp_path / "b", [IterationCheckpoint(keep_last=1)], [0.5], epochs=4)
    monkeypatch.undo()
    _, resumed, _ = fit(tmp_path / "b", [IterationCheckpoint(keep_last=1)], [0.5], epochs=4, ckpt_path="last")
    assert resumed.layer.weight.equal(whole.layer.weight)
    assert names(folder) == names(tmp_path / "a/checkpoints")


def test_a_damaged_last_is_passed_over(tmp_path: Path) -> None:
    fit(tmp_path, [IterationCheckpoint()], [0.5], epochs=3)
    folder = tmp_path / "checkpoints"
    last, before = folder / "iteration=000003.ckpt", folder / "iteration=000002.ckpt"
    data = last.read_bytes()
    last.write_bytes(data[:-100])  # cut short
    with pytest.warns(UserWarning, match=r"iteration=000003\.ckpt is passed over"):
        assert newest_complete(folder) == before
    middle = len(data) // 3
    last.write_bytes(data[:middle] + bytes([data[middle] ^ 255]) + data[middle + 1 :])  # one byte changed
    with pytest.warns(UserWarning, match=r"iteration=000003\.ckpt is passed over"):
        assert newest_complete(folder) == before
    (folder / "last.ckpt").unlink()
    before.unlink()
    last.write_bytes(data)
    assert newest_complete(folder) == last
    assert newest_complete(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x02X\x01\x00\x00\x00\xff.",  # a text that is not UTF-8
        b"",  # the end where an opcode must be
        b"\x80\x02h\x07.",  # a reference to what was never stored
    ],
)
def test_whatever_the_reader_fails_with_is_damage(tmp_path: Path, pickled: bytes) -> None:
    torch.save({"a": 1}, tmp_path / "whole.ckpt")
    path = tmp_path / "iteration=000001.ckpt"
    with zipfile.ZipFile(tmp_path / "whole.ckpt") as whole, zipfile.ZipFile(path, "w") as archive:
        for name in whole.namelist():
            archive.writestr(name, pickled if name.endswith("data.pkl") else whole.read(name))
    assert durable.damage(tmp_path / "whole.ckpt") is None
    assert durable.damage(path) is not None
    with pytest.warns(UserWarning, match=r"iteration=000001\.ckpt is passed over"):
        assert newest_complete(tmp_path) is None


def test_lacking_by_hand(tmp_path: Path) -> None:
    torch.save({"a": 1, "b": 2}, tmp_path / "x.ckpt")
    assert durable.lacking(tmp_path / "x.ckpt", ["a", "c", "b", "d"]) == ["c", "d"]
    torch.save([1], tmp_path / "x.ckpt")
    assert durable.lacking(tmp_path / "x.ckpt", ["a", "b"]) == ["a", "b"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's always full device")
def test_a_full_disk_names_the_folder_and_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    path = tmp_path / "iteration=000001.ckpt"
    DurableCheckpointIO().save_checkpoint({"a": torch.ones(3)}, path)
    (tmp_path / f".{path.name}.partial").symlink_to("/dev/full")
    with pytest.raises(
        OSError, match=r"cannot write a checkpoint: No space left.*free some space.*ckpt_path: last"
    ) as info:
        DurableCheckpointIO().save_checkpoint({"a": torch.zeros(300_000)}, path)
    assert (info.value.errno, info.value.filename) == (errno.ENOSPC, str(tmp_path))
    assert names(tmp_path) == [path.name]
    assert torch.load(path, weights_only=True)["a"].sum() == 3


def test_a_folder_that_cannot_be_made_ends_the_run_before_its_first_iteration(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write checkpoints: .*choose another folder") as info:
        fit(tmp_path, [IterationCheckpoint(folder=str(tmp_path / "file/inside"))], [0.5], epochs=1)
    assert info.value.filename == str(tmp_path / "file/inside")


def test_an_error_that_is_not_the_disks_stays_as_it_is(tmp_path: Path) -> None:
    class Unpicklable:
        def __reduce__(self) -> str:
            raise RuntimeError("cannot be pickled")

    with pytest.raises(RuntimeError, match="cannot be pickled"):
        DurableCheckpointIO().save_checkpoint({"a": Unpicklable()}, tmp_path / "x.ckpt")
    assert names(tmp_path) == []
