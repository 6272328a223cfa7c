"""Starts the fits of a comparison, some side by side, each a process of its own, and waits for them.

A run that was interrupted goes on from its last checkpoint; one that fails does not stop the others. Knows processes;
what they compute is theirs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import gigpo_lightning
from gigpo_lightning.compare.folder import LOG, Run

_POLL_S = 0.2
_GRACE_S = 20.0  # for a process that is told to end
_INTERRUPTED = "interrupted"  # why no more runs are started
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def fit_command(run: Run, config: Mapping[str, Any]) -> list[str]:
    """The command line of a run; it resumes where there is something to resume."""
    policy = config["model"].get("policy") or {}
    seeds = [f"--seed_everything={run.seed}", f"--data.seed={run.seed}"]
    if "init_seed" in (policy.get("init_args") or {}):
        seeds.append(f"--model.policy.init_args.init_seed={run.seed}")
    return [
        *(sys.executable, "-m", "gigpo_lightning", "fit", f"--config={run.folder.parent / 'config.yaml'}"),
        *seeds,
        f"--trainer.default_root_dir={run.folder}",
        *(["--ckpt_path=last"] if run.begun else []),
    ]


@dataclass
class _Child:
    """A process at work."""

    run: Run
    process: subprocess.Popen[bytes]
    started_s: float
    cpu_s: float | None = None  # known once it has ended


@dataclass
class Runner:
    """Works off a list of runs.

    Args:
        configs: The configuration of each variant by name.
        jobs: Runs side by side.
        threads: Threads of each.
        facts: What is noted with every process.
        unchanged: Asked before a run is started: why no more may be, or nothing.
        say: Shows a line.
    """

    configs: Mapping[str, Mapping[str, Any]]
    jobs: int = 1
    threads: int = 1
    facts: Mapping[str, Any] = field(default_factory=dict)
    unchanged: Callable[[], str] = lambda: ""
    say: Callable[[str], None] = lambda line: print(line, flush=True)
    stopped: str = ""
    failed: list[Run] = field(default_factory=list)
    _children: list[_Child] = field(default_factory=list)
    _durations_s: list[float] = field(default_factory=list)

    def work(self, runs: Sequence[Run]) -> None:
        """Start the runs in their order and wait for all; `failed` and `stopped` say what went wrong."""
        waiting, done = list(runs), 0
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            while (waiting and not self.stopped) or (self._children and self.stopped != _INTERRUPTED):
                while waiting and len(self._children) < self.jobs and not self.stopped:
                    self.stopped = self.unchanged()
                    if not self.stopped:
                        self._start(waiting.pop(0))
                for child in [child for child in self._children if _ended(child)]:
                    self._children.remove(child)
                    done += 1
                    self._settle(child, f"[{done}/{len(runs)}]", len(waiting))
                time.sleep(_POLL_S)
        finally:
            self._end_all()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _start(self, run: Run) -> None:
        command = fit_command(run, self.configs[run.variant])
        run.begin(command=command[1:], threads=self.threads, jobs=self.jobs, **self.facts)
        with (run.folder / LOG).open("ab") as log:
            process = subprocess.Popen(
                command, env=self._environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        self._children.append(_Child(run, process, time.monotonic()))
        self.say(f"{run}: {'resumed' if command[-1] == '--ckpt_path=last' else 'started'}")

    def _environment(self) -> dict[str, str]:
        """This process's, with the number of threads, and this very package found from any folder."""
        package = str(Path(gigpo_lightning.__file__).resolve().parents[1])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        threads = dict.fromkeys(_THREADS, str(self.threads))
        return {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(paths)}

    def _settle(self, child: _Child, count: str, waiting: int) -> None:
        """Note and say how a process has ended."""
        run, seconds = child.run, time.monotonic() - child.started_s
        code = child.process.returncode
        run.end(seconds=seconds, cpu_s=child.cpu_s, exit_code=code)
        problem = f"exit code {code}"
        if code == 0:
            try:
                self._say_finished(run.conclude(), count, seconds, waiting)
            except ValueError as error:
                problem, code = str(error), 1
        if code != 0:
            self.failed.append(run)
            self.say(f"{count} {run}: FAILED, {problem}; the end of {run.folder / LOG}:\n{run.last_words()}")

    def _say_finished(self, content: Mapping[str, Any], count: str, seconds: float, waiting: int) -> None:
        self._durations_s.append(seconds)
        success = ", ".join(
            f"{row['stage']} {row['success']:.2f}" for row in content["final"] if row["mode"] == "sampled"
        )
        mean_s = sum(self._durations_s) / len(self._durations_s)
        left_s = mean_s * (waiting / self.jobs + 0.5 * bool(self._children))
        left = f"; about {max(1, round(left_s / 60))} min left" if waiting or self._children else ""
        self.say(f"{count} {content['variant']} seed {content['seed']}: {success}; {seconds / 60:.1f} min{left}")

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Start no more; a second signal ends at once."""
        if self.stopped == _INTERRUPTED:
            for child in self._children:
                child.process.kill()
            return
        self.stopped = _INTERRUPTED
        for child in self._children:
            child.process.terminate()

    def _end_all(self) -> None:
        """End what is still at work."""
        deadline_s = time.monotonic() + _GRACE_S
        for child in self._children:
            child.process.terminate()
        for child in self._children:
            while not _ended(child):
                if time.monotonic() > deadline_s:
                    child.process.kill()
                time.sleep(_POLL_S)
            seconds = time.monotonic() - child.started_s
            child.run.end(seconds=seconds, cpu_s=child.cpu_s, exit_code=child.process.returncode)
        self._children.clear()


def _ended(child: _Child) -> bool:
    """Whether the process has ended; then its return code and its seconds of processor time are known."""
    process = child.process
    if process.returncode is None and hasattr(os, "wait4"):
        found, status, usage = os.wait4(process.pid, os.WNOHANG)
        if found:
            process.returncode = os.waitstatus_to_exitcode(status)
            child.cpu_s = usage.ru_utime + usage.ru_stime
    elif process.returncode is None:
        process.poll()
    return process.returncode is not None
