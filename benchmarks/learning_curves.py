"""The learning curves of the README: whole `fit` runs of several seeds and variants, as JSON and as a picture.

    python -m benchmarks.learning_curves OUT [--variants gigpo grpo step warm] [--seeds 0 1 2] [--minutes M]
        [--jobs 1] [--threads N] [--draw_only] [-- further options of fit]

Every run is the command `python -m gigpo_lightning fit --config alfworld.yaml` in a process of its own, in
`OUT/<variant>-<seed>`. A finished run is not repeated: call again to go on after an interruption. Minutes are wall time
since the process was started, loading included, and validations are part of them. Jobs that run side by side share the
machine: the JSON says how many there were. The picture needs the extra `plots`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.learning_views import (
    LOG_FILE,
    RUN_FILE,
    VARIANTS,
    draw,
    final_table,
    read_run,
    read_state,
    stages_of,
    summary,
)
from gigpo_lightning.files import write_json
from gigpo_lightning.machine import machine


def fit_command(variant: str, seed: int, folder: Path, minutes: float | None, extra: Sequence[str]) -> list[str]:
    """The command line of one run; without `minutes` the configuration's own limit holds."""
    limit_s = None if minutes is None else round(60 * minutes)
    limit = [] if limit_s is None else [f"00:{limit_s // 3600:02}:{limit_s // 60 % 60:02}:{limit_s % 60:02}"]
    return [
        *(sys.executable, "-m", "gigpo_lightning", "fit", "--config", "alfworld.yaml"),
        *(f"--seed_everything={seed}", f"--data.seed={seed}", f"--model.policy.init_args.init_seed={seed}"),
        *(f"--trainer.max_time={duration}" for duration in limit),
        f"--trainer.default_root_dir={folder}",
        *VARIANTS[variant].options,
        *extra,
    ]


def run_once(variant: str, seed: int, options: argparse.Namespace) -> None:
    """Train one seed of a variant unless that is done; its output goes to `fit.log` in its folder."""
    folder: Path = options.out / f"{variant}-{seed}"
    state = read_state(folder)
    if state.get("exit_code") == 0:
        print(f"{folder.name}: finished before")
        return
    if state:  # a part of a run has no curve over wall time: begin again
        shutil.rmtree(folder)
    command = fit_command(variant, seed, folder, options.minutes, options.extra)
    folder.mkdir(parents=True)
    state = {"variant": variant, "seed": seed, "command": shlex.join(command[1:]), "started": time.time()}
    state |= machine("lightning") | {"jobs": options.jobs, "threads": options.threads}
    write_json(folder / RUN_FILE, state)
    print(f"{folder.name}: started")
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    with (folder / LOG_FILE).open("w", encoding="utf-8") as log:
        done = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    write_json(folder / RUN_FILE, {**state, "exit_code": done.returncode, "seconds": time.time() - state["started"]})
    print(f"{folder.name}: " + ("finished" if done.returncode == 0 else f"FAILED, see {folder / LOG_FILE}"))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options; what comes after `--` is handed to fit."""
    own = list(argv[: argv.index("--")] if "--" in argv else argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the runs, and of learning_curves.json and .png")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=["gigpo", "grpo", "step"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, help="limit of each training; default: that of the configuration")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of each run")
    parser.add_argument("--draw_only", action="store_true", help="start nothing, show what there is so far")
    options = parser.parse_args(own)
    options.extra = list(argv[len(own) + 1 :])
    return options


def main(argv: Sequence[str]) -> int:
    """Run what is missing, then write the JSON and the picture; returns 1 where a run failed."""
    options = parse(argv)
    wanted = [(variant, seed) for seed in options.seeds for variant in options.variants]
    if not options.draw_only:
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(lambda pair: run_once(pair[0], pair[1], options), wanted))
    folders = [options.out / f"{variant}-{seed}" for variant in options.variants for seed in options.seeds]
    begun = [folder for folder in folders if (folder / "config.yaml").exists()]
    runs = [run for run in map(read_run, begun) if run["stage"]]
    if not runs:
        print(f"{options.out} holds no run with a finished iteration yet; see {LOG_FILE} in its folders")
        return 1
    write_json(options.out / "learning_curves.json", {"runs": runs})
    draw(runs, options.out / "learning_curves.png")
    print(summary(runs), final_table(runs, stages_of(begun[0])), sep="\n\n")
    return int(any(read_state(folder).get("exit_code", 0) != 0 for folder in folders))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
