"""The curriculum in training: one stage at a time, promoted by the success rate of its own episodes.

The rule is `gigpo_lightning.curriculum.decide`; this file keeps the count and hands the stage to the collector, with
its present turn limit and what is known of its tasks. What became of the stages is told by `stage_report`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from gigpo_lightning.callbacks.output_place import check_folder
from gigpo_lightning.callbacks.seam import Controls, Rollouts, rollouts
from gigpo_lightning.callbacks.stage_report import stage_table, visit
from gigpo_lightning.curriculum import Decision, Stage, decide, load_stages
from gigpo_lightning.files import write_json
from gigpo_lightning.rollout.task_choice import TaskSignal


class Curriculum(Callback):
    """Play the stages of a curriculum in order, each until it is passed.

    List it before `Exploration`, which looks at its promotions. At the end of a fit it shows what became of the stages,
    and writes it to `stages.json` in the trainer's `default_root_dir`.

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
        self.history: list[list[float]] = []  # [won, episodes] of each iteration in the present stage
        self.signal = TaskSignal()  # of the present stage's tasks
        self.env_steps = 0  # taken in the present stage
        self.visits: list[dict[str, Any]] = []  # the stages that were left, see `stage_report`
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
        if stage == "fit" and trainer.is_global_zero:
            check_folder(Path(trainer.default_root_dir), f"trainer.default_root_dir={trainer.default_root_dir}")

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
            self._write(trainer)
        trainer.should_stop = trainer.should_stop or self.finished

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tell what became of the stages."""
        self._write(trainer)
        rows = self.report(rollouts(trainer, self).iteration)
        if rows:
            pl_module.print(stage_table(rows))  # through the progress bar, whose line it would break

    def count(self, data: Rollouts) -> str:
        """Add the reported iteration to the present stage, log the average, apply the decision and say what changed."""
        self.history.append(self._won(data))
        self.env_steps += round(data.report.metrics.get("rollout/env_steps", 0))
        self.signal.update(data.report.classes)
        decision = decide(self.stage, self.history)
        data.report.metrics["curriculum/stage"] = float(self.index)
        data.report.metrics["curriculum/iterations_in_stage"] = float(len(self.history))
        if decision.average is not None:
            data.report.metrics["curriculum/average"] = decision.average
        data.report.metrics.update(self._extra(data))
        news = self._move(decision, data.iteration)
        self._apply(data.controls)
        return news

    def _move(self, decision: Decision, iteration: int) -> str:
        """Go to the next or the previous stage (the last one is passed in place); returns what to tell the user."""
        before, last = self.stage.name, self.index + 1 == len(self.stages)
        moved = "promoted" if decision.promote else "demoted" if decision.demote else None
        if decision.promote and last:
            news = "" if self.passed else f"Curriculum: {before}, the last stage, is passed: {decision.why}"
            self.passed = True
            return news
        if moved is None:
            return ""
        self.visits.append(visit(self.stage, self.history, iteration, self.env_steps, moved, decision.why))
        self.history, self.env_steps, self.signal = [], 0, TaskSignal()
        if decision.promote:
            self.index, self.promoted_at = self.index + 1, iteration
            return f"Curriculum: {before} → {self.stage.name}: {decision.why}"
        self.index, self.passed = self.index - 1, False
        return f"Curriculum: back from {before} to {self.stage.name}: {decision.why}"

    def _won(self, data: Rollouts) -> list[float]:
        """`[won, episodes]` of the stage; where tasks are drawn by signal, what a uniform draw would have won."""
        won, episodes = data.report.success.get(self.stage.name, (0, 0))
        rate = self.signal.uniform_rate(data.report.classes)
        return [int(won), int(episodes)] if rate is None else [rate * episodes, int(episodes)]

    def _extra(self, data: Rollouts) -> dict[str, float]:
        """The figures of a growing horizon and of tasks drawn by signal, where the stage has them."""
        figures = {}
        if data.controls.turn_limit is not None:
            figures["curriculum/max_turns"] = float(data.controls.turn_limit)
        classes = data.report.classes.values()
        if classes:
            spread, groups = sum(c.spread for c in classes), sum(c.groups for c in classes)
            figures |= {
                "curriculum/task_spread": spread / groups,
                "curriculum/task_classes": len(self.signal.estimates),
            }
        return figures

    def _apply(self, controls: Controls) -> None:
        stage = self.stage
        controls.stage = stage
        controls.rehearsal = self.stages[: self.index]
        controls.turn_limit = None if stage.start_turns is None else stage.turn_limit(len(self.history))
        controls.signal = self.signal if stage.task_choice == "signal" else None

    def report(self, iteration: int) -> list[dict[str, Any]]:
        """A row for each stay in a stage, the present one last; `iteration` counts those that were played."""
        moved, why = ("passed" if self.passed else None), decide(self.stage, self.history).why
        present = visit(self.stage, self.history, iteration, self.env_steps, moved, why)
        return [*self.visits, present] if self.history else list(self.visits)

    def _write(self, trainer: pl.Trainer) -> None:
        if trainer.is_global_zero:
            rows = self.report(rollouts(trainer, self).iteration)
            write_json(Path(trainer.default_root_dir) / "stages.json", {"curriculum": self._source, "stages": rows})

    def state_dict(self) -> dict[str, Any]:
        """The stage by name, and the counts in it."""
        return {
            "stage": self.stage.name,
            "history": [list(entry) for entry in self.history],
            "promoted_at": self.promoted_at,
            "passed": self.passed,
            "env_steps": self.env_steps,
            "visits": [dict(row) for row in self.visits],
            "signal": self.signal.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of a checkpoint over; whether its stage still exists is checked when fitting starts."""
        names = [stage.name for stage in self.stages]
        self._restored = state_dict["stage"]
        self.index = names.index(self._restored) if self._restored in names else self.index
        self.history = [list(entry) for entry in state_dict["history"]]
        self.promoted_at = state_dict["promoted_at"]
        self.passed = state_dict["passed"]
        self.env_steps = state_dict["env_steps"]
        self.visits = [dict(row) for row in state_dict["visits"]]
        self.signal.load_state_dict(state_dict["signal"])

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
