"""Keeps what does not concern our users out of a run's output: each message is named, all others come through."""

from __future__ import annotations

import logging
import warnings

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
    # TensorBoardViews logs once an iteration, whatever log_every_n_steps is.
    r"The number of training batches \(\d+\) is smaller than the logging interval",
)
ADVERTISEMENT = "💡 Tip:"  # for Lightning's paid services


class NoAdvertisement(logging.Filter):
    """Drops records that advertise."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is kept."""
        return not record.getMessage().startswith(ADVERTISEMENT)


def quieten() -> None:
    """Drop these messages from now on, in this process."""
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    if not any(isinstance(known, NoAdvertisement) for known in logger.filters):
        logger.addFilter(NoAdvertisement())
