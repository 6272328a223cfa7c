"""Stands in for `fit` in tests of `compare`: leaves its files within milliseconds, or fails, or waits.

    python -m tests.fake_fit FOLDER VARIANT SEED BEHAVIOUR

Its success at the end is 0.1 · seed, and 0.5 more for the variant `good`. A `slow` one writes a checkpoint and waits to
be ended, unless it is resumed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

STAGES = ("near", "far")


def files(variant: str, seed: int) -> dict[str, Any]:
    """`results.json` and `curve.json` of a run."""
    end = round(0.1 * seed + 0.5 * (variant == "good"), 6)
    points = [
        {"iteration": k, "env_steps": 100 * k, "seconds": float(k), "success": dict.fromkeys(STAGES, end * k / 2)}
        for k in range(3)
    ]
    rows = [{"stage": stage, "split": "unseen", "mode": "sampled", "success": end} for stage in STAGES]
    curve = {"iteration": 2, "env_steps": 200, "seconds": 2.0, "peak_bytes": 2**30, "stage": "far", "points": points}
    return {"results.json": {"results": rows}, "curve.json": curve}


def main(folder: Path, variant: str, seed: int, behaviour: str) -> int:
    (folder / "config.yaml").write_text("{}\n")
    if behaviour == "bad":
        print("before the end\nthe end: out of luck")
        return 3
    if behaviour == "slow" and not (folder / "checkpoints").exists():
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "iteration=000001.ckpt").write_text("")
        time.sleep(60)
    for name, content in files(variant, seed).items():
        (folder / name).write_text(json.dumps(content))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]))
