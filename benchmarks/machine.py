"""Where a measurement was made: what every result file says of its commit, machine and versions."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any


def machine(*packages: str) -> dict[str, Any]:
    """Commit, processor, cores and versions of Python, torch and the named packages."""
    repository = Path(__file__).parent
    return {
        "commit": _git(repository, "rev-parse", "--short=12", "HEAD").strip() or "unknown",
        "changed_files": _git(repository, "status", "--porcelain", "--untracked-files=no").splitlines(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", *packages)},
    }


def _git(folder: Path, *args: str) -> str:
    """What git says; empty outside of a checkout."""
    return subprocess.run(["git", "-C", str(folder), *args], capture_output=True, text=True, check=False).stdout


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
