"""Which strategies and precisions of Lightning a run can have, and whether its optimiser runs on the device.

Optimisation is manual and calls parts of the model, and rollouts are played outside of any step: a strategy must leave
the former alone, and a precision must reach the latter. Knows nothing of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.policy.casts import kept_casts
from gigpo_lightning.sharding import FullyShardedStrategy, gathered

_TRAINING = (SingleDeviceStrategy, DDPStrategy, FullyShardedStrategy)
# Large enough for the optimisers of bitsandbytes to keep its state in 8 bits.
_TRIAL_WEIGHTS = 8192


class BFloat16(HalfPrecision):
    """Weights in bfloat16, but not the minibatches: log-probs and advantages stay float32."""

    def convert_input(self, data: Any) -> Any:
        """The batch as it is."""
        return data


_PRECISIONS = (
    (Precision, "32-true"),
    (MixedPrecision, "bf16-mixed"),
    (HalfPrecision, "bf16-true"),
    (BFloat16, "bf16-true"),
)


def precision_refused(precision: Any) -> ValueError:
    """What is said of a precision that a run cannot have."""
    return ValueError(
        f"trainer.precision={precision}: choose 32-true, bf16-mixed or bf16-true; float16 would need its losses "
        "scaled, which manual optimisation does not do"
    )


def strategy_refused(strategy: str) -> ValueError:
    """What is said of a strategy that a run cannot have."""
    why = "cannot train this module, whose optimisation is manual and which calls parts of the model"
    if "deepspeed" in strategy.lower():
        why = "is not supported, as DeepSpeed clips gradients, rounds and writes checkpoints in its own ways"
    return ValueError(
        f"trainer.strategy={strategy}: {why}; choose fsdp2 to spread weights, gradients and optimiser over processes, "
        "ddp, or auto on one device"
    )


def check_strategy(strategy: Strategy) -> None:
    """Refuse a strategy that would train wrongly or not at all.

    Raises:
        ValueError: The message names what can be chosen.
    """
    # Not isinstance: DeepSpeed's strategy is a subclass of DDP's, but has gradients of its own.
    if type(strategy) not in _TRAINING:
        raise strategy_refused(type(strategy).__name__)


def settle_precision(strategy: Strategy) -> None:
    """Refuse a precision that the policy cannot have, and keep `bf16-true` from rounding what is measured.

    Raises:
        ValueError: The message names what can be chosen.
    """
    plugin = strategy.precision_plugin
    if (type(plugin), plugin.precision) not in _PRECISIONS:
        raise precision_refused(plugin.precision)
    if type(plugin) is HalfPrecision:
        rank_zero_warn(
            "trainer.precision=bf16-true: all weights are bfloat16, adapters too: steps below 1/256 of a weight are "
            "lost; bf16-mixed, or policy.dtype=bfloat16 with lora, keep what is trained in float32"
        )
        strategy.precision_plugin = BFloat16("bf16-true")


@contextmanager
def acting(policy: BasePolicy, precision: Precision) -> Iterator[BasePolicy]:
    """The policy in evaluation mode, whole on every process, in the update's precision. All processes must enter."""
    training = policy.training
    policy.eval()
    try:
        with gathered(policy), precision.forward_context(), kept_casts():
            yield policy
    finally:
        policy.train(training)


def check_optimizer(optimizer: Optimizer, make: Callable[[Iterable[Tensor]], Optimizer], device: torch.device) -> None:
    """Let an optimiser of bitsandbytes make a step on a weight of its own: what it lacks shows only there.

    Args:
        optimizer: What `make` has made for the policy.
        make: The optimiser of given weights.
        device: Where the policy is.

    Raises:
        ValueError: It cannot.
    """
    if not type(optimizer).__module__.startswith("bitsandbytes"):
        return
    if any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            f"model.optimizer: {type(optimizer).__name__} of bitsandbytes cannot train weights that are spread over "
            "processes; take torch.optim.AdamW, or the strategy ddp"
        )
    weight = torch.nn.Parameter(torch.zeros(_TRIAL_WEIGHTS, device=device))
    weight.grad = torch.ones_like(weight)
    try:
        make([weight]).step()
    except (RuntimeError, NotImplementedError, AttributeError, OSError) as error:  # it lacks its library, or a kernel
        first = next(iter(str(error).strip().splitlines()), "")
        raise ValueError(
            f"model.optimizer: {type(optimizer).__name__} of bitsandbytes does not run on {device.type} here; take "
            f"torch.optim.AdamW, or a bitsandbytes made for this device ({type(error).__name__}: {first})"
        ) from error
