"""Keeps what does not concern our users out of a run's output: each message is named, all others come through."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging

# Beginnings of warnings, as regular expressions, with why they are of no use here.
WARNINGS = (
    # Lightning's own use of torch; nothing that we or the user could change.
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    # Rollouts are collected in this process, so no loader worker can make the length wrong or the loading faster.
    r"Your `IterableDataset` has `__len__` defined",
    r"The '\w+' does not have many workers",
    # The frozen reference policy is in evaluation mode on purpose.
    r"Found \d+ module\(s\) in eval mode at the start of training",
    # The module's figures are over all processes when it logs them.
    r"It is recommended to use `self\.log\('(loss|time|val|test)/",
    # Transformers' own names for gradient checkpointing are about to change; we go with its present ones.
    r"`(is_gradient_checkpointing|gradient_checkpointing_enable)` is deprecated",
    # TensorBoardViews logs once an iteration, whatever log_every_n_steps is.
    r"The number of training batches \(\d+\) is smaller than the logging interval",
)
# What is said of Ctrl-C in our own words (cli_interrupt.py).
_INTERRUPT = "\nDetected KeyboardInterrupt"
# Beginnings of log records, by logger: Lightning's paid services; kernels that bitsandbytes would like for 4 bit on a
# CPU, said at every start, 4 bit or not; that a checkpoint is about to be restored, as it is said again once it is.
RECORDS = {
    "lightning.pytorch.utilities.rank_zero": ("💡 Tip:", "Restoring states from the checkpoint path", _INTERRUPT),
    "bitsandbytes.backends.cpu.ops": ("Failed to load CPU gemm_4bit_forward",),
}


class Without(logging.Filter):
    """Drops records that begin with one of some texts."""

    def __init__(self, beginnings: tuple[str, ...]):
        super().__init__()
        self._beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is kept."""
        return not record.getMessage().startswith(self._beginnings)


# Loggers that tell of seeds and devices.
_TALKATIVE = ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed")


@contextmanager
def without_details() -> Iterator[None]:
    """For what is only tried: seeds and devices, which are no part of it, are not told while this lasts."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def quieten() -> None:
    """Drop these messages from now on, in this process; and bars of loading that no terminal renews."""
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    for name, beginnings in RECORDS.items():
        logger = logging.getLogger(name)
        if not any(isinstance(known, Without) for known in logger.filters):
            logger.addFilter(Without(beginnings))
