"""What reaches TensorBoard: bad options, by hand, inside a fit, and after a resume."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2

from gigpo_lightning.callbacks import views
from gigpo_lightning.callbacks.checkpoint import IterationCheckpoint
from gigpo_lightning.callbacks.lambda_decay import LambdaDecay
from gigpo_lightning.callbacks.views import LAYOUT, TensorBoardViews, hyperparameters, layout
from gigpo_lightning.policy.critic import CriticRule
from gigpo_lightning.policy.scratch import ScratchPolicy
from gigpo_lightning.rollout.replay import ReplayCache, ReplayRule
from tests.callbacks.tiny import TinyModule, TinyRollouts, fit


@pytest.mark.parametrize("name", ["histograms_every", "transcripts_every"])
def test_a_bad_option_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"TensorBoardViews.{name}=0: must be ≥ 1"):
        TensorBoardViews(**{name: 0})
    with pytest.raises(ValueError, match=r"TensorBoardViews.transcripts=-1: must be ≥ 0"):
        TensorBoardViews(transcripts=-1)


class Pen:
    """Notes what a SummaryWriter is asked to write."""

    def __init__(self) -> None:
        self.written: list[tuple] = []

    def add_histogram(self, name: str, values: np.ndarray, step: int) -> None:
        self.written.append((name, step))

    def add_text(self, name: str, text: str, step: int) -> None:
        self.written.append((name, text, step))

    def flush(self) -> None:
        pass


def test_by_hand_histograms_and_transcripts_take_turns() -> None:
    views, pen = TensorBoardViews(histograms_every=2, transcripts_every=3, transcripts=1), Pen()
    for iteration in range(1, 6):
        views.write(pen, {"h": np.ones(2), "empty": np.ones(0)}, ["a\nb", "c"], iteration)
    text = "    a\n    b"
    assert pen.written == [("h", 1), ("transcripts/0", text, 1), ("h", 3), ("transcripts/0", text, 4), ("h", 5)]


def board(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def logger(root: Path) -> TensorBoardLogger:
    return TensorBoardLogger(root, name="board", version="")


def test_in_a_fit_every_iteration_has_its_figures(tmp_path: Path) -> None:
    callbacks = [LambdaDecay(start=1.0, end=0.0, span=4), TensorBoardViews()]
    fit(tmp_path, callbacks, [0.5, 0.75], epochs=3, logger=logger(tmp_path))
    events = board(tmp_path / "board")
    points = {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert points["rollout/success"] == [(1, 0.5), (2, 0.75), (3, 0.5)]
    assert points["credit/lambda"] == [(1, 1.0), (2, 0.75), (3, 0.5)]
    assert [step for step, _ in points["loss/policy"]] == [1, 2, 3]  # what the module logged, under the iteration too
    assert [point.step for point in events.Histograms("anchors/group_size")] == [1]
    assert b"put a pan" in events.Tensors("transcripts/0/text_summary")[0].tensor_proto.string_val[0]


def test_validations_stand_under_their_iteration_and_are_not_repeated(tmp_path: Path) -> None:
    options = {"limit_val_batches": 1, "check_val_every_n_epoch": 2, "logger": logger(tmp_path)}
    fit(tmp_path, [TensorBoardViews()], [0.5], epochs=5, **options)
    points = [(point.step, point.value) for point in board(tmp_path / "board").Scalars("val/success")]
    assert points == [(0, 0.0), (2, 2.0), (4, 4.0)]  # the sanity check, then every second iteration


def test_the_check_that_begins_a_resumed_run_is_no_point_of_the_curve(tmp_path: Path) -> None:
    options = {"limit_val_batches": 1, "check_val_every_n_epoch": 3, "logger": logger(tmp_path)}
    trainer = fit(tmp_path, [TensorBoardViews()], [0.5], epochs=2, **options)[0]
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    fit(tmp_path, [TensorBoardViews()], [0.5], epochs=4, ckpt_path=tmp_path / "two.ckpt", **options)
    assert [point.step for point in board(tmp_path / "board").Scalars("val/success")] == [0, 3]


def test_layout_and_hparams_are_in_the_same_run(tmp_path: Path) -> None:
    fit(tmp_path, [TensorBoardViews()], [0.5], epochs=1, logger=logger(tmp_path))
    events = board(tmp_path / "board")
    shown = layout_pb2.Layout.FromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    assert [category.title for category in shown.category] == [
        group for group in LAYOUT if group not in ("critic", "replay")
    ]
    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    start = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
    assert start.hparams["data.seed"].number_value == 0
    assert start.hparams["model.optimizer"].string_value == "Adam"
    assert start.hparams["model.optimizer.lr"].number_value == pytest.approx(0.01)
    assert len(list((tmp_path / "board").glob("events*"))) == 1


def test_a_critic_and_borrowed_episodes_have_charts_where_there_are_any() -> None:
    critic = SimpleNamespace(loss=SimpleNamespace(critic=CriticRule()))
    replay = SimpleNamespace(replay=ReplayCache(ReplayRule()))
    assert LAYOUT.keys() - layout(critic, None).keys() == {"replay"}
    assert LAYOUT.keys() - layout(None, replay).keys() == {"critic"}


def test_layout_patterns_are_regular_expressions() -> None:
    for charts in LAYOUT.values():
        for kind, tags in charts.values():
            assert kind == "Multiline"
            assert all(re.compile(tag) for tag in tags)


@pytest.mark.parametrize(
    "name",
    [
        *("anchors/threshold", "anchors/min_count", "anchors/library_baseline_frac", "critic/explained_variance"),
        *("critic/value_mean", "curriculum/max_turns", "loss/approx_kl", "loss/critic_gradient_norm"),
        *(f"replay/{name}" for name in ("share", "age", "ratio_mean", "truncated_frac", "cache_size")),
    ],
)
def test_a_figure_of_some_runs_has_a_chart(name: str) -> None:
    charts = LAYOUT[name.partition("/")[0]].values()
    assert any(re.match(tag, name) for _, tags in charts for tag in tags)


def test_the_chart_of_seconds_leaves_out_what_is_per_second() -> None:
    seconds, throughput = (re.compile(tags[0]) for _, tags in LAYOUT["time"].values())
    assert seconds.match("time/rollout_s")
    assert not seconds.match("time/rollout_tokens_per_s")
    assert throughput.match("time/rollout_tokens_per_s")
    assert not throughput.match("time/rollout_s")


def test_the_options_of_the_policy_are_hyperparameters() -> None:
    module = SimpleNamespace(policy=ScratchPolicy(hidden_size=32, heads=2, verb_last=["take"]))
    found = hyperparameters(module, SimpleNamespace())
    assert found["model.policy.hidden_size"] == 32
    assert found["model.policy.rope_theta"] == 1000.0


def test_hyperparameters_are_plain_and_ours() -> None:
    @dataclass(frozen=True)
    class Rule:
        gamma: float = 0.95

    module, data = TinyModule(), TinyRollouts([0.5], seed=3)
    module.clip, module._hidden, data.rule = 0.2, 1, Rule()
    assert hyperparameters(module, data) == {
        "model.steps": 0,
        "model.clip": 0.2,
        "data.seed": 3,
        "data.eager": True,
        "data.rule.gamma": 0.95,
    }


def test_the_wrong_order_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="list LambdaDecay before TensorBoardViews"):
        fit(tmp_path, [TensorBoardViews(), LambdaDecay()], [0.5], epochs=1)


def test_without_tensorboard_it_says_so(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"TensorBoardViews has no TensorBoardLogger"):
        fit(tmp_path, [TensorBoardViews()], [0.5], epochs=1)


def test_resume_goes_on_under_the_next_iteration(tmp_path: Path) -> None:
    def callbacks() -> list:
        return [TensorBoardViews(), IterationCheckpoint()]

    fit(tmp_path, callbacks(), [0.5], epochs=2, logger=logger(tmp_path))
    fit(tmp_path, callbacks(), [0.5], epochs=4, ckpt_path="last", logger=logger(tmp_path))
    # Sorted: the reader takes the files of one second by their counter as text, ".10" before ".9".
    assert sorted(point.step for point in board(tmp_path / "board").Scalars("rollout/success")) == [1, 2, 3, 4]


def test_a_stage_that_was_not_played_again_gets_no_new_point(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[dict[str, float]] = []
    monkeypatch.setattr(views, "_log", lambda trainer, found, iteration: logged.append(dict(found)))
    figures = {"val/small/success": 0.9, "val/large/success": 0.2, "loss/policy": 1.0}
    data = SimpleNamespace(iteration=3, controls=None)
    trainer = SimpleNamespace(callback_metrics=figures, datamodule=data, sanity_checking=False)
    module = SimpleNamespace(results=[{"stage": "large"}])
    TensorBoardViews().on_validation_end(trainer, module)  # type: ignore[arg-type]
    assert logged == [{"val/large/success": 0.2}]
