"""Which of Lightning's strategies a training can run under.

Optimisation is manual and calls parts of the model, so a strategy must leave both alone. Knows nothing of the loss.
"""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

_TRAINING = (SingleDeviceStrategy, DDPStrategy)


def check_strategy(strategy: Strategy) -> None:
    """Refuse a strategy that would train wrongly or not at all.

    Raises:
        ValueError: The message names what can be chosen.
    """
    # Not isinstance: DeepSpeed's strategy is a subclass of DDP's, but has gradients of its own.
    if type(strategy) not in _TRAINING:
        raise ValueError(
            f"trainer.strategy: {type(strategy).__name__} cannot train this module, whose optimisation is manual and "
            "which calls parts of the model; choose ddp, or auto on one device"
        )
