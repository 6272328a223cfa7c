"""The command `check`: examines an installation part by part, and says what to do about what is missing.

`cli_install_parts` and `cli_install_devices` examine; this file orders the parts, prints the findings and says whether
training is possible. Nothing of other projects is imported before Lightning's releases have been looked at.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from gigpo_lightning import __version__
from gigpo_lightning import cli_install_devices as devices
from gigpo_lightning import cli_install_parts as installed
from gigpo_lightning.cli_install_parts import FAILED, INSTALL, OK, Problem


@dataclass(frozen=True, slots=True)
class Finding:
    """What is known of one part. `required`: training on the CPU needs it."""

    part: str
    state: str
    detail: str
    advice: str
    required: bool
    seconds: float

    def text(self) -> str:
        """One line, and one more where there is something to do."""
        optional = "" if self.required or self.state == OK else " (optional)"
        first = f"{self.state:<9}{self.part:<20}{self.detail}{optional}"
        return f"{first}\n{'':<29}{self.advice}" if self.advice else first


@dataclass(frozen=True, slots=True)
class Part:
    """One thing to prove: `check` returns what it found, or raises."""

    name: str
    check: Callable[[], str]
    required: bool = True

    def examine(self) -> Finding:
        """Run the check; whatever a broken package raises is told as its failure."""
        begin = time.perf_counter()
        state, advice = OK, ""
        try:
            with _quiet():
                detail = self.check()
        except Problem as problem:
            state, detail, advice = problem.state, problem.detail, problem.advice
        except Exception as error:  # noqa: BLE001 - importing or running a broken package can raise anything
            state, detail, advice = FAILED, " ".join(f"{type(error).__name__}: {error}".split())[:400], INSTALL
        return Finding(self.name, state, detail, advice, self.required, round(time.perf_counter() - begin, 3))


def run_check(args: Sequence[str]) -> int:
    """Examine every part and print one line on each.

    Args:
        args: The command line after `check`.

    Returns:
        0 where all required parts are in order, else 1.
    """
    parser = argparse.ArgumentParser(prog="python -m gigpo_lightning check", allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument("--runs_dir", type=Path, default=Path("runs"), help="the folder that runs will be written into")
    options = parser.parse_args(list(args))
    findings = []
    for finding in examine(options.runs_dir):
        findings.append(finding)
        if not options.json:
            print(finding.text(), flush=True)
    bad = [finding.part for finding in findings if finding.required and finding.state != OK]
    if options.json:
        parts = [asdict(finding) for finding in findings]
        print(json.dumps({"ok": not bad, "version": __version__, "parts": parts}, indent=2))
    elif bad:
        print(f"gigpo_lightning {__version__} cannot train here, because of: {', '.join(bad)}")
    else:
        print(f"gigpo_lightning {__version__} can train here: python -m gigpo_lightning fit --config alfworld.yaml")
    return 1 if bad else 0


def examine(runs_dir: Path) -> Iterator[Finding]:
    """The findings one by one; of a malicious release of Lightning nothing is imported, and that is the last finding.

    Args:
        runs_dir: The folder that runs will be written into.
    """
    yield Part("python", installed.python).examine()
    releases = Part("lightning", installed.lightning_releases).examine()
    if releases.state != OK:
        yield releases
        return
    for part in _required(runs_dir):
        yield part.examine()
    gpu = Part("gpu", devices.gpus, required=False).examine()
    yield gpu
    if gpu.state == OK:
        yield Part("training on gpu", partial(devices.training, "gpu"), required=False).examine()
    for part in _optional():
        yield part.examine()


def _required(runs_dir: Path) -> list[Part]:
    """What training on the CPU needs, beside Python and harmless releases of Lightning."""
    libraries = {**installed.LIGHTNING, **installed.LIBRARIES}
    return [
        *(Part(name, partial(installed.library, name, module)) for name, module in libraries.items()),
        Part("configurations", installed.configurations),
        Part("runs folder", partial(installed.writable, runs_dir)),
        Part("training on cpu", partial(devices.training, "cpu")),
    ]


def _optional() -> list[Part]:
    """What only some configurations need, beside a GPU."""
    return [
        Part("bitsandbytes", devices.four_bit, required=False),
        Part("model cache", installed.model_cache, required=False),
        Part("alfworld games", installed.alfworld_games, required=False),
        *(Part(name, partial(installed.extra, name), required=False) for name in installed.EXTRAS),
    ]


@contextmanager
def _quiet() -> Iterator[None]:
    """Warnings and messages of the packages would only repeat what the findings say; what they print goes to stderr."""
    with warnings.catch_warnings(), redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)
