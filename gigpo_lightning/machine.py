"""Where a measurement was made: what every result file says of its commit, code, machine and versions."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parent


def machine(*packages: str) -> dict[str, Any]:
    """Commit, processor, cores and versions of Python, torch and the named packages."""
    return {
        "commit": _git("rev-parse", "--short=12", "HEAD").strip() or "unknown",
        "changed_files": _git("status", "--porcelain", "--untracked-files=no").splitlines(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", *packages)},
    }


def code_digest() -> str:
    """12 hexadecimal digits that change with any line of the package's Python code."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(_PACKAGE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _git(*args: str) -> str:
    """What git says of the checkout; empty for an installed package, which may lie in a checkout of something else."""
    if not (_PACKAGE.parent / "pyproject.toml").is_file():
        return ""
    try:
        done = subprocess.run(["git", "-C", str(_PACKAGE), *args], capture_output=True, text=True, check=False)
    except FileNotFoundError:  # there is no git
        return ""
    return done.stdout


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
