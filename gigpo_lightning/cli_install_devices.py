"""GPUs, 4-bit weights and an update, as `check` examines them: each computes something small whose result is known.

Each function returns what it found, or raises a `Problem`; packages are imported inside, as any may be missing.
"""

from __future__ import annotations

import re
import tempfile
import time
from pathlib import Path
from typing import Any

from gigpo_lightning.cli_install_parts import FAILED, INSTALL, MISSING, Problem, version_of

_DRIVER = Path("/proc/driver/nvidia/version")
# 4-bit weights keep a product with random vectors to about 10 %; a broken kernel gives something else altogether.
_FOUR_BIT_ERROR = 0.25
_ONE_QUIET_EPOCH: dict[str, Any] = {
    "devices": 1,
    "max_epochs": 1,
    "limit_val_batches": 0,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


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
    found = version_of("bitsandbytes")
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
            **_ONE_QUIET_EPOCH,
            accelerator=accelerator,
            plugins=[LightningEnvironment()],  # this process alone, also where a cluster's launcher started several
            default_root_dir=folder,
        )
        trainer.fit(module, data)
    after = torch.cat([parameter.detach().cpu().flatten() for parameter in policy.parameters()])
    if torch.equal(before, after):
        raise Problem(FAILED, "an update left the weights as they were", INSTALL)
    turns = 2 * data.report.metrics["rollout/length"]
    return f"2 episodes, {turns:.0f} turns, {trainer.global_step} update in {time.perf_counter() - begin:.1f} s"
