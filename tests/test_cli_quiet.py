"""What is kept out of a run's output, and that nothing else is."""

from __future__ import annotations

import logging
import warnings

import pytest

from gigpo_lightning.cli_quiet import quieten

LOGGER = "lightning.pytorch.utilities.rank_zero"
# As Lightning 2.6.6 words them.
OF_NO_USE = (
    "`isinstance(treespec, LeafSpec)` is deprecated, use `isinstance(treespec, TreeSpec) and treespec.is_leaf()`.",
    "Your `IterableDataset` has `__len__` defined. In combination with multi-process data loading",
    "The 'val_dataloader' does not have many workers which may be a bottleneck. Consider increasing the value",
    "Found 47 module(s) in eval mode at the start of training. This may lead to unexpected behavior during training.",
    "`is_gradient_checkpointing` is deprecated and will be removed in v6. Use `is_activation_checkpointing` instead.",
    "The number of training batches (8) is smaller than the logging interval Trainer(log_every_n_steps=50).",
)
OF_USE = ("Your `IterableDataset` is empty", "The number of training batches is 0", "The loss is deprecated")


def test_the_named_warnings_are_dropped_and_all_others_shown() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        quieten()
        for message in (*OF_NO_USE, *OF_USE):
            warnings.warn(message, UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in shown] == list(OF_USE)


@pytest.mark.parametrize("terminal", [False, True])
def test_bars_of_loading_are_for_terminals(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.utils import logging as transformers_logging

    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    transformers_logging.enable_progress_bar()
    with warnings.catch_warnings():
        quieten()
    assert transformers_logging.is_progress_bar_enabled() == terminal
    transformers_logging.enable_progress_bar()


def test_kernels_that_nobody_asked_for_are_not_missed(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    with warnings.catch_warnings(), caplog.at_level(logging.INFO, logger=logger.name):
        quieten()
        logger.warning("Failed to load CPU gemm_4bit_forward from %s: %s", "somewhere", "No module named 'kernels'")
        logger.warning("Something else")
    assert caplog.messages == ["Something else"]


def test_advertisements_are_dropped_and_other_information_shown(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger(LOGGER)
    before = list(logger.filters)
    with warnings.catch_warnings(), caplog.at_level(logging.INFO, logger=LOGGER):
        quieten()
        quieten()
        logger.info("💡 Tip: For seamless cloud logging and experiment tracking, try installing [litlogger]")
        logger.info("Restoring states from the checkpoint path at x.ckpt")  # said again once they are restored
        logger.info("GPU available: %s", False)
    added = [known for known in logger.filters if known not in before]
    assert caplog.messages == ["GPU available: False"]
    assert len(added) <= 1  # once, however often it is called
