"""Peak memory of an iteration and of its update against the number of episodes, as a table and as JSON.

    python -m benchmarks.episode_memory [--episodes 256 1024 4096] [--max_turns 8] [--output docs/episode_memory.json]

Every number of episodes is one iteration of a real `fit` (generated ALFWorld households, a policy of 30,000 weights, 8
episodes per group, the same number of minibatches) in a process of its own. What is read, every 2 ms, is `RssAnon` of
/proc/self/status: memory that only this process can give back. Pages of the mapped rollout file are `RssFile`: they
count in a process's RSS, but the system drops them when somebody needs the room. Linux only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from gigpo_lightning.callbacks.anchor_library import AnchorLibrary
from gigpo_lightning.datamodule import RolloutDataModule
from gigpo_lightning.envs.alfworld.tasks import GeneratedTasks
from gigpo_lightning.files import write_json
from gigpo_lightning.machine import machine
from gigpo_lightning.module import GiGPOModule
from gigpo_lightning.policy.scratch import ScratchPolicy
from gigpo_lightning.rollout.context import SegmentRule

MEMBERS, ROWS, MINIBATCHES = 8, 64, 4
BATCH_TOKENS = 2048  # the fewest episodes fill a micro-batch, too
KINDS = ("RssAnon", "RssFile")


def resident_mib() -> dict[str, float]:
    """Resident memory of this process, MiB by kind."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {kind: int(fields[kind].split()[0]) / 1024 for kind in KINDS}


class Watch(pl.Callback):
    """The highest figures of each phase: `collection` until the first minibatch is there, then `update`."""

    def __init__(self) -> None:
        self.peaks: dict[str, dict[str, float]] = {}
        self.phase, self._is_on = "", True
        self._thread = threading.Thread(target=self._look, daemon=True)

    def begin(self, phase: str) -> None:
        self.peaks[phase] = dict.fromkeys(KINDS, 0.0)
        self.phase = phase
        self.look()

    def _look(self) -> None:
        while self._is_on:
            self.look()
            time.sleep(0.002)

    def look(self) -> None:
        peaks = self.peaks[self.phase]
        for kind, value in resident_mib().items():
            peaks[kind] = max(peaks[kind], value)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.begin("start")
        self.begin("collection")
        self._thread.start()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.begin("update")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.begin("end")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._is_on = False
        self._thread.join()


def measure(episodes: int, max_turns: int, folder: Path) -> dict[str, Any]:
    """One iteration of that many episodes, in this process."""
    torch.set_num_threads(1)
    watch, begin = Watch(), time.perf_counter()
    data = RolloutDataModule(
        GeneratedTasks(difficulty={"receptacles": [3, 5]}),
        groups=episodes // MEMBERS,
        members=MEMBERS,
        passes=1,
        minibatches=MINIBATCHES,
        max_tokens_per_batch=BATCH_TOKENS,
        max_turns=max_turns,
        rows=ROWS,
        segments=SegmentRule(max_tokens=1024),
    )
    module = GiGPOModule(ScratchPolicy(32, layers=1, heads=2, kv_heads=1), kl_coef=0.0)
    trainer = pl.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        max_epochs=1,
        limit_val_batches=0,
        callbacks=[AnchorLibrary(), watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)
    figures = data.report.metrics
    return {
        "episodes": episodes,
        "turns": round(figures["rollout/length"] * episodes),
        "tokens": round(figures["rollout/tokens_per_episode"] * episodes),
        "file_mib": sum(path.stat().st_size for path in folder.rglob("*.arrow")) / 2**20,
        "seconds": time.perf_counter() - begin,
        "peak_mib": watch.peaks,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The measurements as Markdown: MiB above what the process held before the iteration."""
    lines = ["| episodes | tokens | rollout file | collection | update | library | mapped pages |", f"|{'---|' * 7}"]
    for row in rows:
        peaks = row["peak_mib"]
        above = [peaks[p]["RssAnon"] - peaks["start"]["RssAnon"] for p in ("collection", "update", "end")]
        mapped = max(peak["RssFile"] for peak in peaks.values()) - peaks["start"]["RssFile"]
        cells = [f"{row['episodes']:,}", f"{row['tokens']:,}", f"{row['file_mib']:.0f} MiB"]
        lines.append(f"| {' | '.join([*cells, *(f'{value:.0f} MiB' for value in (*above, mapped))])} |")
    return "\n".join(lines)


def main() -> None:
    """Measure each number of episodes in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--max_turns", type=int, default=8)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--here", action="store_true", help="measure one number in this process, and print JSON")
    options = parser.parse_args()
    if options.here:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(options.episodes[0], options.max_turns, Path(folder))))
        return
    rows = []
    for episodes in options.episodes:
        command = [sys.executable, "-m", "benchmarks.episode_memory", "--here"]
        command += [f"--episodes={episodes}", f"--max_turns={options.max_turns}"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    print(f"\n{table(rows)}")
    if options.output:
        found = {"machine": machine("lightning"), "max_turns": options.max_turns, "rows": ROWS, "measured": rows}
        write_json(options.output, found)


if __name__ == "__main__":
    main()
