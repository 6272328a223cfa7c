"""Packages and folders, as `check` examines them: each function returns what it found, or raises a `Problem`.

Packages are imported inside the functions: one that is missing or broken must not hide the others. What devices compute
is in `cli_install_devices`.
"""

from __future__ import annotations

import platform
import sys
from importlib import import_module, metadata
from pathlib import Path

from gigpo_lightning.cli_run import check_space, check_writable

OK, MISSING, FAILED = "ok", "missing", "failed"
PYTHONS = ((3, 10), (3, 14))  # the oldest and the newest that pyproject.toml allows
# Distribution → what is imported of it. Lightning exists under two names; two releases of it, under both names, were
# malicious uploads to PyPI.
LIGHTNING = {"lightning": "lightning.pytorch", "pytorch-lightning": "pytorch_lightning"}
MALICIOUS = ("2.6.2", "2.6.3")
LIBRARIES = {
    "torch": "torch",
    "transformers": "transformers",
    "tokenizers": "tokenizers",
    "peft": "peft",
    "jsonargparse": "jsonargparse",
    "tensorboard": "tensorboard.program",  # the program needs more than the package
    "rapidfuzz": "rapidfuzz.distance",
    "pyarrow": "pyarrow",
    "numpy": "numpy",
    "pyyaml": "yaml",
    "jinja2": "jinja2",
    "rich": "rich",
}
_COMPARE = "pip install -c constraints.txt '.[compare]'"
EXTRAS = {
    "scipy": f"statistics of the command compare: {_COMPARE}",
    "matplotlib": f"pictures of the command compare: {_COMPARE}",
    "textworld": "the stock ALFWorld engine, for comparison; Python up to 3.12: pip install -c constraints.txt "
    "'.[textworld]'",
    "vllm": "another engine for rollouts (data.engine): pip install '.[vllm]'; on Linux, Python 3.11 and newer",
}
INSTALL = "install again with the tested versions: pip install -c constraints.txt ."
_MOUNT = "name a folder that this user may write (in a container: mount it, with --user of its owner)"


class Problem(Exception):
    """A part that is missing or does not work: its state, what was found, and what to do."""

    def __init__(self, state: str, detail: str, advice: str = "") -> None:
        super().__init__(detail)
        self.state, self.detail, self.advice = state, detail, advice


# -- packages ----------------------------------------------------------------------------------------------------------


def python() -> str:
    """The interpreter's version.

    Raises:
        Problem: One that this package does not run on.
    """
    oldest, newest = PYTHONS
    found = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    if not oldest <= sys.version_info[:2] <= newest:
        raise Problem(FAILED, found, f"use Python {oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}")
    return found


def lightning_releases() -> str:
    """Looks for malicious releases by what is written about them: importing one would run it.

    Raises:
        Problem: One is installed.
    """
    for name in LIGHTNING:
        if (found := version_of(name)) in MALICIOUS:
            raise Problem(
                FAILED,
                f"{name} {found} is a malicious upload: nothing more is examined, as that would run it",
                f"pip uninstall {' '.join(LIGHTNING)}; replace the secrets that this account can read; {INSTALL}",
            )
    return ""


def library(name: str, module: str) -> str:
    """The version of a distribution that is there, allowed and can be imported.

    Raises:
        Problem: It is not installed, or in a version that this package does not allow.
    """
    found = version_of(name)
    if found is None:
        raise Problem(MISSING, "not installed", INSTALL)
    needed = _needed(name)
    if not _allowed(found, needed):
        raise Problem(FAILED, f"{found} is installed, but {needed} is needed", INSTALL)
    import_module(module)
    return found


def extra(name: str) -> str:
    """The version of an optional package, which is not loaded: some take long, or change the process.

    Raises:
        Problem: It is not installed.
    """
    if (found := version_of(name)) is None:
        raise Problem(MISSING, "not installed", EXTRAS[name])
    return f"{found}, not loaded"


def version_of(name: str) -> str | None:
    """The installed version of a distribution, without loading it; None where there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _needed(name: str) -> str:
    """The versions of a distribution that this package allows; empty in a source checkout that is not installed."""
    from packaging.requirements import Requirement

    try:
        required = [Requirement(text) for text in metadata.requires("gigpo-lightning") or ()]
    except metadata.PackageNotFoundError:
        return ""
    return next((str(r.specifier) for r in required if r.name.lower() == name and "extra" not in str(r.marker)), "")


def _allowed(version: str, needed: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(needed).contains(version, prereleases=True)


# -- files -------------------------------------------------------------------------------------------------------------


def configurations() -> str:
    """The shipped configurations and curricula, of which one is read."""
    from gigpo_lightning.curriculum import load_stages
    from gigpo_lightning.resources import find_file, shipped_dir, shipped_files

    find_file("configs", "alfworld.yaml")
    stages = load_stages("alfworld.yaml")
    return f"{len(shipped_files('configs'))} in {shipped_dir('configs')}; {len(stages)} stages in alfworld.yaml"


def writable(folder: Path) -> str:
    """A folder that can be written, or made.

    Raises:
        Problem: It cannot, or its disk is nearly full.
    """
    folder = folder.expanduser().absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        check_space(existing)
        check_writable(existing)
    except OSError as error:
        raise Problem(FAILED, f"{existing}: {(error.strerror or str(error)).partition(';')[0]}", _MOUNT) from error
    return f"{folder} can be written"


def model_cache() -> str:
    """The folder that models are downloaded into ($HF_HOME).

    Raises:
        Problem: It cannot be written, or its disk is nearly full.
    """
    from huggingface_hub.constants import HF_HOME

    return writable(Path(HF_HOME))


def alfworld_games() -> str:
    """The folder of the recorded games.

    Raises:
        Problem: There are none.
    """
    from gigpo_lightning.envs.alfworld.recorded import find_data

    try:
        return str(find_data(None))
    except ValueError as error:
        advice = "RecordedTasks only: alfworld-download fetches them into $ALFWORLD_DATA; generated games need none"
        raise Problem(MISSING, str(error).partition(". ")[0], advice) from error
