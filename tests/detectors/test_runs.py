"""Detectors in real fits of the box world: each option has an effect, is logged, and goes on after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gigpo_lightning.callbacks import IterationCheckpoint
from gigpo_lightning.detectors import (
    Detector,
    EmbeddingDetector,
    ExactDetector,
    HybridDetector,
    ManualDetector,
    Pattern,
    SimilarityDetector,
    WindowDetector,
)
from gigpo_lightning.rollout.collection import CreditRule
from tests.toy_run import fit, weights
from tests.toy_world import BoxTasks

SEEN = [Pattern(observation=r"in it is a (\w+)")]


def figures(root: Path, detector: Detector | str) -> dict[str, float]:
    """Of the first iteration, whose turns are the same whatever the detector."""
    _, _, data = fit(root, data={"credit": CreditRule(detector=detector)})
    return {name: value for name, value in data.report.metrics.items() if name.startswith("anchors/")}


def test_each_detector_groups_otherwise(tmp_path: Path) -> None:
    detectors: dict[str, Detector | str] = {
        "exact": "exact",
        "window": WindowDetector(min_count=4),
        "similarity": SimilarityDetector(0.95),
        "embedding": EmbeddingDetector(0.0),
        "manual": ManualDetector(SEEN),
        "hybrid": HybridDetector(exclude=SEEN),
    }
    found = {name: figures(tmp_path / name, detector) for name, detector in detectors.items()}
    coverage = {name: round(one["anchors/coverage"], 4) for name, one in found.items()}
    assert len(set(coverage.values())) == len(detectors), coverage
    assert coverage["embedding"] == 1.0  # every cosine is at least 0 here, so that a task is one state
    assert found["embedding"]["anchors/density"] == 1.0
    assert coverage["window"] < coverage["exact"]
    thresholds = {name: one.get("anchors/threshold") for name, one in found.items()}
    assert thresholds == dict.fromkeys(detectors) | {"similarity": 0.95, "embedding": 0.0}
    assert found["window"]["anchors/min_count"] == 4.0
    assert figures(tmp_path / "object", ExactDetector()) == found["exact"]


def steered() -> Detector:
    return HybridDetector(SimilarityDetector(0.9, target_density=(0.1, 0.11)), exclude=[Pattern(action="take")])


def counted() -> Detector:
    return WindowDetector(window=3, min_count=6, target_density=(0.1, 0.11))


@pytest.mark.parametrize("make", [steered, counted, lambda: EmbeddingDetector(0.9, target_density=(0.1, 0.11))])
def test_a_resumed_run_goes_on_like_the_uninterrupted_one(tmp_path: Path, make: Any) -> None:
    def run(name: str, epochs: int, ckpt_path: str | None = None) -> tuple[dict[str, float], torch.Tensor, Any]:
        callback = IterationCheckpoint(folder=str(tmp_path / name / "kept"))
        data = {"credit": CreditRule(detector=make()), "tasks": BoxTasks(3, size=5)}
        _, module, datamodule = fit(tmp_path / name, epochs, [callback], data=data, ckpt_path=ckpt_path)
        kept = {n: v for n, v in datamodule.report.metrics.items() if not n.startswith("time/")}
        return kept, weights(module), datamodule.crediting.detector.state_dict()

    whole = run("whole", 4)
    run("half", 2)
    (ckpt,) = sorted((tmp_path / "half" / "kept").glob("iteration=*.ckpt"))[-1:]
    resumed = run("half", 4, str(ckpt))
    assert resumed[0].keys() == whole[0].keys()
    assert {n: v for n, v in resumed[0].items() if v == whole[0][n] or v != v} == resumed[0]
    assert torch.equal(resumed[1], whole[1])
    for name, value in whole[2].items():
        assert torch.equal(torch.as_tensor(resumed[2][name]), torch.as_tensor(value))
    moved = "anchors/min_count" if make is counted else "anchors/threshold"
    assert whole[0][moved] not in (6.0, 0.9)  # it was steered, else the comparison would compare little


def test_another_kind_of_detector_starts_without_memory(tmp_path: Path) -> None:
    callback = IterationCheckpoint(folder=str(tmp_path / "kept"))
    fit(tmp_path, 1, [callback], data={"credit": CreditRule(detector=counted())})
    (ckpt,) = (tmp_path / "kept").glob("iteration=*.ckpt")
    with pytest.warns(UserWarning, match="memory of WindowDetector, not of HybridDetector"):
        fit(tmp_path, 2, data={"credit": CreditRule(detector=steered())}, ckpt_path=str(ckpt))


def hybrid(automatic: Detector | str) -> dict[str, Any]:
    return {"credit": CreditRule(detector=HybridDetector(automatic, exclude=[Pattern(action="take")]))}


@pytest.mark.parametrize(("first", "then"), [("window", "similarity"), ("similarity", "window"), ("window", "exact")])
def test_a_hybrid_of_another_detector_starts_without_memory(tmp_path: Path, first: str, then: str) -> None:
    """What a hybrid remembers is its automatic detector's."""
    made = {"window": WindowDetector(), "similarity": SimilarityDetector(target_density=(0.1, 0.2)), "exact": "exact"}
    callback = IterationCheckpoint(folder=str(tmp_path / "kept"))
    fit(tmp_path, 1, [callback], data=hybrid(made[first]))
    (ckpt,) = (tmp_path / "kept").glob("iteration=*.ckpt")
    with pytest.warns(UserWarning, match="memory of HybridDetector of .*, not of HybridDetector of"):
        fit(tmp_path, 2, data=hybrid(made[then]), ckpt_path=str(ckpt))


def test_a_detector_by_name_remembers(tmp_path: Path) -> None:
    _, _, data = fit(tmp_path, 2, data={"credit": CreditRule(detector="window")})
    detector = data.crediting.detector
    assert isinstance(detector, WindowDetector)
    assert len(detector.state_dict()["lengths"]) == 2
    assert (detector.state_dict()["lengths"] > 0).all()
