"""Every example of docs/anchors.md is a detector that can be built from YAML."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from jsonargparse import ArgumentParser

from gigpo_lightning.detectors import Detector
from gigpo_lightning.detectors.named import make_detector
from gigpo_lightning.rollout.collection import CreditRule

TEXT = (Path(__file__).parents[2] / "docs/anchors.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_example_is_a_detector(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("my_package.my_module")
    module.is_crossroads = bool  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_package.my_module", module)
    parser = ArgumentParser()
    parser.add_argument("--credit", type=CreditRule)
    made = parser.instantiate_classes(parser.parse_object(yaml.safe_load(example)["data"]))
    assert isinstance(make_detector("detector", made.credit.detector), Detector)


def test_every_kind_has_an_example() -> None:
    kinds = {"exact", "WindowDetector", "SimilarityDetector", "EmbeddingDetector", "ManualDetector", "HybridDetector"}
    assert {kind for kind in kinds for example in EXAMPLES if kind in example} == kinds
