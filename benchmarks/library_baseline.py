"""How often the anchor library knows the state of a lone step, and how well it predicts its return, by scope.

Replays the rollout files that a run has kept, so run it with a large `data.keep_rollouts`:

    python -m gigpo_lightning fit --config alfworld.yaml --data.keep_rollouts 1000 --trainer.max_epochs 70
    python benchmarks/library_baseline.py runs/alfworld/version_0
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pyarrow as pa

from gigpo_lightning.callbacks.anchor_table import SCOPES, AnchorTable, keys_of
from gigpo_lightning.functional.baselines import singleton_advantages

MAX_ANCHORS = 20_000


def replay(files: list[Path], scope: str, skip: int) -> dict[str, float | None]:
    """Shares of steps, R² of the library's mean, and how often the bound cut, without the first `skip` iterations."""
    table, counts = AnchorTable(scope), np.zeros(4)
    returns: list[np.ndarray] = []
    means: list[np.ndarray] = []
    for number, file in enumerate(files):
        rows = pa.ipc.open_stream(pa.OSFile(str(file))).read_all().to_pylist()
        columns = ("anchor", "observation", "step_return", "step_group")
        flat = [(row["task_id"], *turn) for row in rows for turn in zip(*(row[c] for c in columns), strict=True)]
        keys = keys_of(scope, *([turn[i] for turn in flat] for i in range(3)))
        step_return, group = (np.array([turn[i] for turn in flat]) for i in (3, 4))
        known = table.look_up(keys)
        advantage, used = (part.numpy() for part in singleton_advantages(step_return, group, *known))
        if number >= skip:
            free = np.abs(step_return - known.mean)[used] / (np.sqrt(known.variance[used]) + 1e-6)
            cut = free > np.abs(advantage[used]) * (1 + 1e-9)
            counts += [len(flat), (np.bincount(group)[group] == 1).sum(), used.sum(), cut.sum()]
            returns.append(step_return[used])
            means.append(known.mean[used])
        table.merge(AnchorTable.of_turns(keys, step_return, [""] * len(flat), [""] * len(flat), number, 0))
        if len(table) > MAX_ANCHORS:
            table.shrink(MAX_ANCHORS * 3 // 4)
    steps, single, hits, cuts = counts
    seen, guess = np.concatenate(returns), np.concatenate(means)
    spread = float(((seen - seen.mean()) ** 2).sum()) if len(seen) else 0.0
    return {
        "steps": steps,
        "lone_frac": single / steps,
        "used_of_steps": hits / steps,
        "used_of_lone": hits / max(single, 1),
        "r2": 1 - float(((seen - guess) ** 2).sum()) / spread if spread else None,
        "cut_frac": cuts / max(hits, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a run with its rollouts")
    parser.add_argument("--skip", type=int, default=10, help="first iterations that are not counted")
    options = parser.parse_args()
    files = sorted((options.run / "rollouts").glob("*_rank0.arrow"))
    if len(files) <= options.skip:
        raise SystemExit(f"{options.run}: {len(files)} rollout files; more than --skip {options.skip} are needed")
    print(json.dumps({scope: replay(files, scope, options.skip) for scope in SCOPES}, indent=1))


if __name__ == "__main__":
    main()
