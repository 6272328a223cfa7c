"""The parts of an installation that `check` examines: each function returns what it found, or raises a `Problem`.

Packages are imported inside the functions: one that is missing or broken must not hide the others.
"""

from __future__ import annotations

import platform
import re
import sys
import tempfile
import time
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
    "pyarrow": "pyarrow",
    "numpy": "numpy",
    "pyyaml": "yaml",
    "jinja2": "jinja2",
    "rich": "rich",
}
EXTRAS = {
    "textworld": "the stock ALFWorld engine, for comparison; Python up to 3.12: pip install -c constraints.txt "
    "'.[textworld]'",
    "vllm": "another decoding engine",
}
INSTALL = "install again with the tested versions: pip install -c constraints.txt ."
_MOUNT = "name a folder that this user may write (in a container: mount it, with --user of its owner)"
_DRIVER = Path("/proc/driver/nvidia/version")
# 4-bit weights keep a product with random vectors to about 10 %; a broken kernel gives something else altogether.
_FOUR_BIT_ERROR = 0.25


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
        if (found := _version(name)) in MALICIOUS:
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
    found = _version(name)
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
    if (found := _version(name)) is None:
        raise Problem(MISSING, "not installed", EXTRAS[name])
    return f"{found}, not loaded"


def _version(name: str) -> str | None:
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


# -- devices -----------------------------------------------------------------------------------------------------------


def gpus() -> str:
    """Name, memory and bf16 of every GPU, each having computed something.

    Raises:
        Problem: There is none; the detail says why.
    """
    import torch

    if not torch.cuda.is_available():
        raise Problem(MISSING, *_why_no_gpu())
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        ones = torch.ones(64, 64, device=f"cuda:{index}")
        if not bool((ones @ ones == 64).all()):
            raise Problem(FAILED, f"{properties.name}: a product of matrices is wrong", "try another GPU or driver")
        with torch.cuda.device(index):
            bf16 = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no bf16"
        found.append(f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {bf16}")
    return f"{'; '.join(found)}; CUDA {torch.version.cuda}{_driver()}"


def _driver() -> str:
    """`, driver 580.65.06`, where the system tells."""
    match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", _DRIVER.read_text()) if _DRIVER.is_file() else None
    return f", driver {match[1]}" if match else ""


def _why_no_gpu() -> tuple[str, str]:
    """Why torch finds no GPU, and what to do."""
    import torch

    if torch.version.cuda is None:
        return "this torch is built for the CPU", "with a GPU: install torch for CUDA, see pytorch.org"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().partition(". ")[0]
    else:
        reason = "no device is visible"
    advice = f"with a GPU: a driver for CUDA {torch.version.cuda}; in a container also --gpus all (docs/docker.md)"
    return f"{reason}{_driver()}", advice


def four_bit() -> str:
    """A layer of 4-bit weights whose product is near that of the full weights.

    Raises:
        Problem: bitsandbytes is not installed, or computes something else.
    """
    found = _version("bitsandbytes")
    if found is None:
        raise Problem(MISSING, "not installed: no 4- and 8-bit weights, no 8-bit optimisers", INSTALL)
    import torch
    from bitsandbytes.nn import Linear4bit

    device = "cuda" if torch.cuda.is_available() else "cpu"
    draws = torch.Generator().manual_seed(0)
    weight, inputs = torch.randn(64, 64, generator=draws), torch.randn(8, 64, generator=draws)
    layer = Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    layer.load_state_dict({"weight": weight})
    exact, given = inputs @ weight.T, layer.to(device)(inputs.to(device)).cpu()
    error = float((given - exact).norm() / exact.norm())
    if not error < _FOUR_BIT_ERROR:
        raise Problem(FAILED, f"{found}: 4-bit weights on {device} are {error:.0%} off", "policy.quantization=none")
    return f"{found}, 4 bit works on {device}"


def training(accelerator: str) -> str:
    """One iteration of a tiny policy: a group is played, its turns are credited, the weights are updated.

    Args:
        accelerator: `cpu` or `gpu`.

    Raises:
        Problem: The weights are unchanged. That they are not finite is an error of the module's own.
    """
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.plugins.environments import LightningEnvironment

    from gigpo_lightning.datamodule import RolloutDataModule
    from gigpo_lightning.envs.alfworld.tasks import GeneratedTasks
    from gigpo_lightning.module import GiGPOModule
    from gigpo_lightning.policy.scratch import ScratchPolicy

    begin = time.perf_counter()
    tasks = GeneratedTasks().narrow({"receptacles": 2})
    policy = ScratchPolicy(hidden_size=16, layers=1, heads=2, kv_heads=1)
    policy.prepare(tasks)
    before = torch.cat([parameter.detach().flatten().clone() for parameter in policy.parameters()])
    # Without weight decay the weights change by a gradient only; the entropy bonus gives one even if all episodes fail.
    module = GiGPOModule(policy, optimizer=lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.0), kl_coef=0.0)
    data = RolloutDataModule(tasks, groups=1, members=2, passes=1, minibatches=1, max_turns=5, entropy_coef=0.01)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator=accelerator,
            devices=1,
            plugins=[LightningEnvironment()],  # this process alone, also where a cluster's launcher started several
            default_root_dir=folder,
            max_epochs=1,
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, data)
    after = torch.cat([parameter.detach().cpu().flatten() for parameter in policy.parameters()])
    if torch.equal(before, after):
        raise Problem(FAILED, "an update left the weights as they were", INSTALL)
    turns = 2 * data.report.metrics["rollout/length"]
    return f"2 episodes, {turns:.0f} turns, {trainer.global_step} update in {time.perf_counter() - begin:.1f} s"
