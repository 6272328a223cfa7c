"""Temperature and entropy coefficient: bad options, by hand, inside a fit, after a resume."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from gigpo_lightning.callbacks.checkpoint import IterationCheckpoint
from gigpo_lightning.callbacks.curriculum import Curriculum
from gigpo_lightning.callbacks.exploration import Exploration
from tests.callbacks.tiny import TinyRollouts, fit


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, r"Exploration.temperature=0.0: must stay > 0"),
        (
            {"temperature": {"schedule": "linear", "start": 1.0, "end": 0.0, "span": 5}},
            "Exploration.temperature=.* > 0",
        ),
        ({"entropy_coef": -0.1}, r"Exploration.entropy_coef=-0.1: must stay ≥ 0"),
        ({"entropy_coef": {"schedule": "bend", "start": 1}}, "Exploration.entropy_coef=.*'bend' is unknown"),
        (
            {"entropy_coef": {"schedule": ["linear"], "start": 1}},
            r"Exploration.entropy_coef=.*\['linear'\] is unknown; choose one",
        ),
        ({"temperature": float("nan")}, "Exploration.temperature=nan.* not a finite number"),
        ({"entropy_coef": {"start": 1}}, "Exploration.entropy_coef=.*`schedule` is missing"),
        ({"temperature": {"schedule": "constant", "strat": 1}}, "Exploration.temperature=.*strat: not an option"),
        (
            {"temperature": {"schedule": "constant", "start": "hot"}},
            "Exploration.temperature=.*start: 'hot' is not a number",
        ),
        ({"temperature_boost": -1}, "Exploration.temperature_boost=-1: must be ≥ 0"),
        ({"entropy_boost": float("nan")}, "Exploration.entropy_boost=nan"),
        ({"boost_iterations": 0}, "Exploration.boost_iterations=0: must be ≥ 1"),
    ],
)
def test_a_bad_option_is_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Exploration(**options)


def test_by_hand() -> None:
    exploration = Exploration(
        temperature={"schedule": "linear", "start": 1.2, "end": 1.0, "span": 10},
        entropy_coef=0.01,
        temperature_boost=0.5,
        entropy_boost=1.0,
        boost_iterations=4,
    )
    assert exploration.values(5, None) == pytest.approx((1.1, 0.01))
    assert exploration.values(10, 10) == pytest.approx((1.5, 0.02))  # 1.0 · 1.5 and 0.01 · 2 at the promotion
    assert exploration.values(11, 10) == pytest.approx((1.375, 0.0175))  # 1.0 · (1 + 0.5 · 3/4), 0.01 · (1 + 3/4)
    assert exploration.values(14, 10) == pytest.approx((1.0, 0.01))


def curriculum(folder: Path) -> Curriculum:
    path = folder / "two.yaml"
    path.write_text("stages: [{name: a, min_iterations: 2}, {name: b, min_iterations: 99}]")
    return Curriculum(str(path))


def boosted() -> Exploration:
    return Exploration(entropy_coef=0.01, temperature_boost=0.5, boost_iterations=2)


def test_in_a_fit_the_first_collection_of_a_stage_is_boosted(tmp_path: Path) -> None:
    _, _, data = fit(tmp_path, [curriculum(tmp_path), boosted()], [0.9], epochs=5)
    assert [entry["stage"] for entry in data.seen] == ["a", "a", "b", "b", "b"]
    assert [entry["temperature"] for entry in data.seen] == pytest.approx([1.0, 1.0, 1.5, 1.25, 1.0])
    assert [entry["entropy_coef"] for entry in data.seen] == pytest.approx([0.01] * 5)
    assert data.report.metrics["rollout/temperature"] == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["temperature", "entropy_coef"])
def test_a_value_of_the_datamodule_as_well_is_refused(name: str) -> None:
    data = TinyRollouts([0.0])
    data.given[name] = 0.7
    trainer = SimpleNamespace(datamodule=data, callbacks=[])
    with pytest.raises(ValueError, match=f"data.{name}=0.7: Exploration in trainer.callbacks sets this"):
        Exploration().on_fit_start(trainer, None)  # type: ignore[arg-type]


def test_the_wrong_order_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="list Curriculum before Exploration"):
        fit(tmp_path, [boosted(), curriculum(tmp_path)], [0.9], epochs=1)


def test_resume_equals_uninterrupted(tmp_path: Path) -> None:
    def callbacks() -> list:
        return [curriculum(tmp_path), boosted(), IterationCheckpoint()]

    _, _, straight = fit(tmp_path / "a", callbacks(), [0.9], epochs=5)
    fit(tmp_path / "b", callbacks(), [0.9], epochs=2)  # cut where the promotion has just happened
    _, _, rest = fit(tmp_path / "b", callbacks(), [0.9], epochs=5, ckpt_path="last")
    assert rest.seen == straight.seen[2:]
