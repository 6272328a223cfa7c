"""The curriculum in training: one stage at a time, promoted by the success rate of its own episodes.

The rule is `gigpo_lightning.curriculum.decide`; this file keeps the count and hands the stage to the collector.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from gigpo_lightning.callbacks.seam import Controls, Rollouts, rollouts
from gigpo_lightning.curriculum import Decision, Stage, decide, load_stages


class Curriculum(Callback):
    """Play the stages of a curriculum in order, each until it is passed.

    List it before `Exploration`, which looks at its promotions.

    Args:
        curriculum: A curriculum file, or the name of a shipped one, e.g. `alfworld.yaml`.
        start: The first stage to play: its number, counted from 0, or its name. A resumed run goes on where it was.
        stop_when_passed: End the training when the last stage is passed; otherwise go on in it.

    Raises:
        ValueError: The file is missing or bad, or has no stage `start`.
    """

    def __init__(self, curriculum: str, start: int | str = 0, stop_when_passed: bool = True) -> None:
        self.stages = load_stages(curriculum)
        self.index = _position(self.stages, start, curriculum)
        self.stop_when_passed = stop_when_passed
        self.history: list[list[int]] = []  # [won, episodes] of each iteration in the present stage
        self.promoted_at: int | None = None  # the first iteration played after the latest promotion
        self.passed = False
        self._source = curriculum
        self._restored = ""

    @property
    def stage(self) -> Stage:
        """The stage being played."""
        return self.stages[self.index]

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to train for."""
        return self.passed and self.stop_when_passed

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Tell evaluations which stages there are."""
        rollouts(trainer, self).controls.stages = self.stages

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Hand the first stage, or the restored one, to the collector."""
        self._check_restored()
        self._apply(rollouts(trainer, self).controls)
        trainer.should_stop = trainer.should_stop or self.finished

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count the iteration, move if the rule says so, and stop after the last stage."""
        news = self.count(rollouts(trainer, self))
        if news:
            pl_module.print(news)
        trainer.should_stop = trainer.should_stop or self.finished

    def count(self, data: Rollouts) -> str:
        """Add the reported iteration to the present stage, log the average, apply the decision and say what changed."""
        won, episodes = data.report.success.get(self.stage.name, (0, 0))
        self.history.append([int(won), int(episodes)])
        decision = decide(self.stage, self.history)
        data.report.metrics["curriculum/stage"] = float(self.index)
        data.report.metrics["curriculum/iterations_in_stage"] = float(len(self.history))
        if decision.average is not None:
            data.report.metrics["curriculum/average"] = decision.average
        news = self._move(decision, data.iteration)
        self._apply(data.controls)
        return news

    def _move(self, decision: Decision, iteration: int) -> str:
        """Go to the next or the previous stage (the last one is passed in place); returns what to tell the user."""
        before, last = self.stage.name, self.index + 1 == len(self.stages)
        if decision.promote and last:
            news = "" if self.passed else f"Curriculum: {before}, the last stage, is passed: {decision.why}"
            self.passed = True
            return news
        if decision.promote:
            self.index, self.promoted_at, self.history = self.index + 1, iteration, []
            return f"Curriculum: {before} → {self.stage.name}: {decision.why}"
        if decision.demote:
            self.index, self.history = self.index - 1, []
            return f"Curriculum: back from {before} to {self.stage.name}: {decision.why}"
        return ""

    def _apply(self, controls: Controls) -> None:
        controls.stage = self.stage
        controls.rehearsal = self.stages[: self.index]

    def state_dict(self) -> dict[str, Any]:
        """The stage by name, and the counts in it."""
        return {
            "stage": self.stage.name,
            "history": [list(entry) for entry in self.history],
            "promoted_at": self.promoted_at,
            "passed": self.passed,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of a checkpoint over; whether its stage still exists is checked when fitting starts."""
        names = [stage.name for stage in self.stages]
        self._restored = state_dict["stage"]
        self.index = names.index(self._restored) if self._restored in names else self.index
        self.history = [list(entry) for entry in state_dict["history"]]
        self.promoted_at = state_dict["promoted_at"]
        self.passed = state_dict["passed"]

    def _check_restored(self) -> None:
        """Refuse to go on in a stage that the file no longer has. Only fitting cares: tests do not use the stage."""
        names = [stage.name for stage in self.stages]
        if self._restored and self._restored not in names:
            raise ValueError(
                f"the checkpoint was made in stage {self._restored!r}, but curriculum {self._source!r} has only "
                f"{', '.join(names)}; resume with the curriculum of that run, or start without ckpt_path"
            )


def _position(stages: Sequence[Stage], start: int | str, source: str) -> int:
    """The number of the stage `start`, given by number or name."""
    names = [stage.name for stage in stages]
    if isinstance(start, str) and start in names:
        return names.index(start)
    if isinstance(start, int) and not isinstance(start, bool) and 0 <= start < len(stages):
        return start
    numbered = ", ".join(f"{number} = {name}" for number, name in enumerate(names))
    raise ValueError(f"start is {start!r}, but curriculum {source!r} has the stages {numbered}")
