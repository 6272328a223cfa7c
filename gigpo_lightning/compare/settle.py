"""The whole configuration of every variant, settled and tried before the first run is started.

`fit`'s own parser reads a variant's options; what a comparison needs is put in: the budget, the evaluations, and a
checkpoint after every iteration. The result is a file that says everything about a run but its seed and its folder.
"""

from __future__ import annotations

import io
import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import yaml

from gigpo_lightning.callbacks import Curriculum, DirectTraining
from gigpo_lightning.cli import GiGPOCLI
from gigpo_lightning.cli_errors import show_traceback
from gigpo_lightning.cli_quiet import quieten, without_details
from gigpo_lightning.cli_ranks import forget
from gigpo_lightning.compare.options import Budget, Options
from gigpo_lightning.compare.variants import Variant, edit_callbacks
from gigpo_lightning.curriculum import load_stages, stage_named

_SPLIT = "unseen"


def settle(variant: Variant, options: Options) -> dict[str, Any]:
    """The configuration of a variant, as plain values in the order of `fit --print_config`.

    Raises:
        ValueError: `fit` would refuse it, or it has not the stages to be evaluated; the message names the variant.
    """
    config = yaml.safe_load(_said(variant, lambda: _Reader([*options.fit, *variant.options]).text))
    try:
        prepare(config, variant, options)
    except ValueError as error:
        raise ValueError(f"variant {variant.name}: {error}") from None
    with tempfile.TemporaryDirectory(prefix="gigpo-compare-") as folder:
        path = Path(folder, f"{variant.name}.yaml")
        path.write_text(dump(config), encoding="utf-8")
        try:
            builder = _said(variant, lambda: _Builder(["--config", str(path), "--runs_dir", folder]))
        except ValueError as error:  # its lines are those of a file that nobody has written, and that is gone
            raise ValueError(re.sub(rf" \({re.escape(str(path))}:\d+\)", "", str(error))) from error
        settled: dict[str, Any] = yaml.safe_load(builder.text)
    return settled


def dump(config: Mapping[str, Any]) -> str:
    """A configuration as YAML."""
    return yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)


def prepare(config: dict[str, Any], variant: Variant, options: Options) -> None:
    """Put what a comparison needs into a configuration.

    Raises:
        ValueError: A stage that is to be evaluated is not there.
    """
    trainer, evaluation = config["trainer"], config["data"]["evaluation"]
    listed = trainer.get("callbacks") or []
    callbacks = edit_callbacks(listed if isinstance(listed, list) else [listed], variant.callbacks)
    curve, limits = _schedule(options.budget, options.checks)
    trainer.update(limits)
    edits: dict[str, dict[str, Any]] = {
        "gigpo_lightning.callbacks.StepBudget": {"env_steps": options.budget.env_steps} if limits else {},
        "gigpo_lightning.callbacks.LearningCurve": curve,
        # The final figure is that of the last weights, for every algorithm alike.
        "gigpo_lightning.callbacks.IterationCheckpoint": {"best_by": None, "keep_last": 2, "folder": None},
    }
    if any(entry["class_path"].rsplit(".")[-1] == "Curriculum" for entry in callbacks) and limits:
        edits["Curriculum"] = {"stop_when_passed": False}  # the budget decides
    trainer["callbacks"] = edit_callbacks(callbacks, edits)
    trainer["num_sanity_val_steps"] = -1  # the first point of a curve: the untrained policy in all stages
    stages = _stages(trainer["callbacks"])
    if options.evaluate:
        for name in options.evaluate:
            stage_named(stages, name, "--evaluate")
    chosen = list(options.evaluate) or list(dict.fromkeys(stage.name for stage in (*stages[:1], *stages[-1:])))
    evaluation.update({"splits": [_SPLIT], "stages": chosen or None, "during_fit_stages": chosen or None})


def _schedule(budget: Budget, checks: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """When the curve gets its points, and the trainer's limits that give way to the budget."""
    unlimited = {"max_epochs": -1, "max_steps": -1, "max_time": None}
    if budget.env_steps is not None:
        return {"every_env_steps": max(1, budget.env_steps // checks), "every_s": None}, unlimited
    if budget.seconds is not None:
        limit = {**unlimited, "max_time": _duration(max(1, round(budget.seconds)))}
        return {"every_env_steps": None, "every_s": budget.seconds / checks}, limit
    return {}, {}


def _duration(seconds: int) -> str:
    """Seconds as the trainer's days:hours:minutes:seconds."""
    return f"{seconds // 86400:02}:{seconds // 3600 % 24:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _stages(callbacks: Sequence[Mapping[str, Any]]) -> Any:
    """All stages that evaluations may play: those of the callback that is given a curriculum."""
    for entry in callbacks:
        file = (entry.get("init_args") or {}).get("curriculum")
        if file is not None:
            return load_stages(file)
    return ()


def _said(variant: Variant, make: Any) -> Any:
    """What `make` gives; where it ends with a message, an error with that message and the variant's name."""
    quieten()
    words = io.StringIO()
    try:
        with without_details(), redirect_stderr(words):
            return make()
    except SystemExit as end:
        if end.code in (0, None) or show_traceback():
            raise
        message = words.getvalue().strip().removeprefix("error: ")
        raise ValueError(f"variant {variant.name}: {message}") from None
    except (ValueError, TypeError, OSError) as error:
        raise ValueError(f"variant {variant.name}: {error}") from error
    finally:
        forget()


class _Reader(GiGPOCLI):
    """The command line of `fit`, which is only read.

    Args:
        args: The command line after `fit`.
    """

    def __init__(self, args: Sequence[str]) -> None:
        super().__init__("fit", args)

    @property
    def text(self) -> str:
        """The configuration as YAML, as `--print_config` shows it."""
        config = self.config[self.command].clone()
        for key in ("config", "ckpt_path", "weights_only", "runs_dir"):
            config.pop(key, None)
        text: str = self._parser(self.command).dump(config, skip_none=False, skip_validation=True)
        return text

    def before_instantiate_classes(self) -> None:
        """Nothing: there is no run."""

    instantiate_classes = after_instantiate_classes = before_instantiate_classes

    def _run_subcommand(self, subcommand: str) -> None:
        """Nothing is run."""


class _Builder(GiGPOCLI):
    """The command line of `fit`, which makes everything and then starts nothing.

    Args:
        args: The command line after `fit`.
    """

    text = _Reader.text

    def __init__(self, args: Sequence[str]) -> None:
        super().__init__("fit", args)

    def _run_subcommand(self, subcommand: str) -> None:
        """Nothing is run; what it would write into goes."""
        assert self.place is not None
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        stages = next((c.stages for c in callbacks if isinstance(c, (Curriculum, DirectTraining))), ())
        self.datamodule.evaluation.check(stages, self.datamodule.tasks.splits)
        self.place.folder.discard()
