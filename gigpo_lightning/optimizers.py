"""The optimiser of a run and the one of the checkpoint that it goes on from: torch takes over any state without asking.

Knows optimisers; nothing about what they train.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

_PLAIN = (bool, int, float, str, tuple)


def made(
    factory: Callable[[Iterable[Tensor]], Optimizer], parts: Sequence[Sequence[Tensor]], head_lr: float | None = None
) -> Optimizer:
    """The optimiser of these parameters.

    Args:
        factory: What makes it from parameters, or from groups of them.
        parts: The parameters of the model, and those of the value head where there is one.
        head_lr: Learning rate of the value head, where there is one.

    Raises:
        ValueError: Its options do not fit; the message names `model.optimizer`.
    """
    if head_lr is None:
        (groups,) = parts
    else:
        groups = [{"params": parts[0]}, {"params": parts[1], "lr": head_lr}]  # type: ignore[list-item]
    try:
        return factory(groups)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ValueError(f"model.optimizer: {error}") from error


def check_scheduled(optimizer: Optimizer, head_lr: float | None) -> None:
    """Refuse a schedule that has given the value head another learning rate than its own to start from.

    Raises:
        ValueError: It has.
    """
    found = optimizer.param_groups[-1].get("initial_lr", head_lr)
    if head_lr is not None and found != head_lr:
        raise ValueError(
            f"model.lr_scheduler sets the learning rates itself, model.critic.lr={head_lr} to {found}: take one that "
            "multiplies them, such as LambdaLR, LinearLR or CosineAnnealingLR"
        )


def described(optimizer: Optimizer) -> dict[str, Any]:
    """Class and options, as plain values for a checkpoint."""
    options = {name: value for name, value in optimizer.defaults.items() if isinstance(value, _PLAIN)}
    if len(optimizer.param_groups) > 1:
        head = optimizer.param_groups[-1]
        options["lr of model.critic"] = float(head.get("initial_lr", head["lr"]))
    return {"class": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}", "options": options}


def check_resumed(optimizer: Optimizer, saved: Mapping[str, Any] | None) -> None:
    """Refuse another class than that of the checkpoint, and say which options do not count.

    Args:
        optimizer: What was made for this run; its state will be replaced by the checkpoint's.
        saved: `described` of the checkpoint's, or None where it does not say.

    Raises:
        ValueError: The class differs.
    """
    if saved is None:
        return
    own = described(optimizer)
    if own["class"] != saved["class"]:
        raise ValueError(
            f"model.optimizer={own['class']}: the checkpoint was trained with {saved['class']}, whose state it cannot "
            "take over; resume with that one, or start without ckpt_path"
        )
    here, there = own["options"], saved["options"]
    different = [name for name in here if name in there and here[name] != there[name]]
    if different:
        given, kept = (", ".join(f"{name}={options[name]}" for name in different) for options in (here, there))
        rank_zero_warn(f"model.optimizer: {given} does not count, a resumed run keeps what its checkpoint has ({kept})")
