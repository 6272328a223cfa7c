"""λ by schedule: bad options, the hook by hand, inside a fit, after a resume."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from gigpo_lightning.callbacks.checkpoint import IterationCheckpoint
from gigpo_lightning.callbacks.lambda_decay import LambdaDecay
from tests.callbacks.tiny import TinyRollouts, fit


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": 1.5}, r"LambdaDecay.start=1.5: must be a λ, in \[0, 1\]"),
        ({"end": -0.1}, r"LambdaDecay.end=-0.1: must be a λ, in \[0, 1\]"),
        ({"start": float("nan")}, "LambdaDecay.start=nan"),
        ({"schedule": "step"}, "'step' is unknown; choose one of published"),
        ({"schedule": "linear", "start": 1.0}, "end: missing"),
        ({"schedule": "constant", "start": 1.0, "span": 5}, "span: not an option"),
        ({"span": 0}, "span: 0 is not a positive number"),
        ({"start": 0.4}, r"^LambdaDecay.end: λ = 0.5 is outside \[0, start = 0.4\]"),
        ({"start": 0.4, "end": 0.6}, r"^LambdaDecay.end: λ = 0.6 is outside"),
    ],
)
def test_a_bad_option_is_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LambdaDecay(**options)


@pytest.mark.parametrize(
    ("options", "iteration", "lam"),
    [
        ({}, 0, 1.0),  # max(0.5, 1 − k/100)
        ({}, 30, 0.7),
        ({}, 80, 0.5),
        ({"start": 0.9, "end": 0.7, "span": 10}, 1, 0.8),
        ({"schedule": "constant", "start": 0.8}, 99, 0.8),
        ({"schedule": "linear", "start": 1.0, "end": 0.0, "span": 4}, 1, 0.75),
    ],
)
def test_by_hand(options: dict, iteration: int, lam: float) -> None:
    data = TinyRollouts([0.0])
    data.iteration = iteration
    LambdaDecay(**options).apply(data)
    assert data.controls.lam == pytest.approx(lam)


def test_a_lambda_of_the_datamodule_as_well_is_refused() -> None:
    data = TinyRollouts([0.0])
    data.given["lam"] = 0.7
    trainer = SimpleNamespace(datamodule=data)
    with pytest.raises(ValueError, match=r"data\.lam=0\.7: LambdaDecay in trainer.callbacks sets this"):
        LambdaDecay().on_fit_start(trainer, None)  # type: ignore[arg-type]


def test_in_a_fit_every_collection_sees_its_own_lambda(tmp_path: Path) -> None:
    _, _, data = fit(tmp_path, [LambdaDecay(start=1.0, end=0.5, span=10)], [0.5], epochs=4)
    assert [entry["lam"] for entry in data.seen] == pytest.approx([1.0, 0.9, 0.8, 0.7])
    assert data.report.metrics["credit/lambda"] == pytest.approx(0.7)


def test_resume_equals_uninterrupted(tmp_path: Path) -> None:
    def callbacks() -> list:
        return [LambdaDecay(start=1.0, end=0.0, span=5), IterationCheckpoint()]

    _, whole, straight = fit(tmp_path / "a", callbacks(), [0.5], epochs=5)
    fit(tmp_path / "b", callbacks(), [0.5], epochs=2)
    _, resumed, rest = fit(tmp_path / "b", callbacks(), [0.5], epochs=5, ckpt_path="last")
    assert rest.seen == straight.seen[2:]
    assert resumed.layer.weight.equal(whole.layer.weight)
