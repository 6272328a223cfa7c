"""The progress of a run for the eye: one line that renews itself in a terminal, one line per iteration elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, TextIO

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar, Timer
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.table import Table

from gigpo_lightning.callbacks.curriculum import Curriculum
from gigpo_lightning.callbacks.seam import Rollouts, find, rollouts
from gigpo_lightning.paths import shown

# Columns of the closing table where no terminal limits them: a path on two lines could not be copied.
_UNFOLDED = 1000


@dataclass(frozen=True)
class Figures:
    """What the line says; None where it is not known."""

    iteration: int
    iterations: int | None = None
    stage: str | None = None
    lam: float | None = None
    success: float | None = None
    episodes_per_s: float | None = None
    left_s: float | None = None


class IterationProgress(ProgressBar):
    """Show iteration, stage, λ, success rate, episodes per second and time left, and a table at the end.

    Args:
        refresh_s: Shortest time between two renewals of the line in a terminal, in seconds, ≥ 0.

    Raises:
        ValueError: `refresh_s` is negative.
    """

    def __init__(self, refresh_s: float = 0.2) -> None:
        super().__init__()
        if not refresh_s >= 0:
            raise ValueError(f"IterationProgress.refresh_s={refresh_s}: must be ≥ 0 seconds")
        self.refresh_s = refresh_s
        self.figures = Figures(0)
        self.best_success: float | None = None
        self._durations_s: deque[float] = deque(maxlen=5)
        self._enabled = True
        self._begun_s = self._iteration_begun_s = self._drawn_s = time.monotonic()
        self._episodes = 0
        self._played: tuple[str, str, float] = ("", "", 0.0)  # see on_train_epoch_start
        self._resumed_at = 0  # the iterations that were done when this process began
        self._waiting: list[tuple[Any, Any]] | None = None  # what is printed after the iteration's own line

    @property
    def is_enabled(self) -> bool:
        """Whether anything is shown; Lightning asks before it prints through this bar."""
        return self._enabled

    def disable(self) -> None:
        """Show nothing; Lightning calls this on all processes but the first."""
        self._enabled = False

    def enable(self) -> None:
        """Show again."""
        self._enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print without breaking the line; news of an iteration come after the iteration's own line."""
        if self._waiting is not None and not _is_terminal(sys.stdout):
            self._waiting.append((args, kwargs))
            return
        self._clear()
        print(*args, **kwargs)

    def _print_waiting(self) -> None:
        waiting, self._waiting = self._waiting or [], None
        for args, kwargs in waiting:
            print(*args, **kwargs)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._begun_s = self._iteration_begun_s = time.monotonic()
        self._resumed_at = trainer.current_epoch  # the first collection has counted its iteration already
        self.figures = Figures(rollouts(trainer, self).iteration, _iterations(trainer))
        self._draw("collecting")

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note what the collection is made with, before callbacks set the next."""
        controls = rollouts(trainer, self).controls
        self._played = (_stage_label(trainer), controls.stage.name if controls.stage else "", controls.lam)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Renew the line now and then."""
        if time.monotonic() - self._drawn_s >= self.refresh_s:
            self._draw(f"update {batch_idx + 1}/{trainer.num_training_batches}")
        if batch_idx + 1 >= trainer.num_training_batches:
            self._waiting = []

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say that an evaluation is under way; before the first iteration there is no line yet to add that to."""
        if trainer.sanity_checking:
            self.figures = Figures(rollouts(trainer, self).iteration, _iterations(trainer))
        self._draw("evaluating")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the iteration's figures; elsewhere than in a terminal this is where the line is written."""
        self._count(trainer, rollouts(trainer, self))
        if self._enabled and not _is_terminal(sys.stdout):
            print(line(self.figures), flush=True)
        self._print_waiting()
        self._draw("collecting")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Close with a table."""
        self._clear()
        self._print_waiting()
        if self._enabled:
            Console(width=None if _is_terminal(sys.stdout) else _UNFOLDED).print(self.summary(trainer))

    def on_test_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Say what is played: an evaluation takes minutes, and ends with all of its figures at once."""
        if self._enabled and hasattr(batch, "jobs"):
            count = trainer.num_test_batches[dataloader_idx]
            of = "" if count == float("inf") else f"/{count}"  # evaluations are planned while they are played
            what = f"evaluation {batch_idx + 1}{of}: {batch.stage}, {batch.split}, {batch.mode}"
            print(f"{what}, {len(batch.jobs)} episodes …", flush=True)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave the line to the message that follows."""
        self._clear()
        self._print_waiting()

    def _count(self, trainer: pl.Trainer, data: Rollouts) -> None:
        """Figures of the iteration that has just ended."""
        now_s = time.monotonic()
        self._durations_s.append(now_s - self._iteration_begun_s)
        self._iteration_begun_s = now_s
        label, stage, lam = self._played
        lam = data.report.metrics.get("credit/lambda", lam)  # the estimator may have set its own
        episodes = sum(played for _, played in data.report.success.values())
        self._episodes += episodes
        success = success_of(data, stage)
        if success is not None:
            self.best_success = max(success, self.best_success or 0.0)
        mean_s = sum(self._durations_s) / len(self._durations_s)
        iterations = _iterations(trainer)
        left_s = [] if iterations is None else [(iterations - data.iteration) * mean_s]
        timers = [timer.time_remaining() for timer in trainer.callbacks if isinstance(timer, Timer)]  # type: ignore[attr-defined]
        left_s += [remaining_s for remaining_s in timers if remaining_s is not None]
        self.figures = Figures(
            data.iteration,
            iterations,
            label or None,
            lam,
            success,
            episodes / self._durations_s[-1] if episodes else None,
            min(left_s, default=None),
        )

    def summary(self, trainer: pl.Trainer) -> Table:
        """The closing table: what was reached, how long it took, where things are."""
        elapsed_s = time.monotonic() - self._begun_s
        table = Table(title="Training finished", show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")  # a path that is cut could not be copied
        done, since = self.figures.iteration, ", since the resume" if self._resumed_at else ""
        before = f" ({self._resumed_at} of them before the resume)" if self._resumed_at else ""
        checkpoints = trainer.checkpoint_callback
        for name, value in (
            ("iterations", f"{done}{before}"),
            (f"time{since}", clock(elapsed_s)),
            (f"episodes{since}", f"{self._episodes} ({self._episodes / max(elapsed_s, 1e-9):.1f}/s)"),
            ("stage", _stage_label(trainer) + _passed(trainer)),
            ("success in the last iteration", _rate(self.figures.success)),
            (f"highest success in any stage{since}", _rate(self.best_success)),
            ("last checkpoint", _path(getattr(checkpoints, "last_model_path", ""))),
            ("best checkpoint (latest stage first)", _path(getattr(checkpoints, "best_model_path", ""))),
            ("TensorBoard", _path(next((b.log_dir for b in trainer.loggers if isinstance(b, TensorBoardLogger)), ""))),
        ):
            if value:
                table.add_row(name, value)
        return table

    def _draw(self, doing: str) -> None:
        """Renew the line of a terminal, cut to its width."""
        if self._enabled and _is_terminal(sys.stdout):
            self._drawn_s = time.monotonic()
            sys.stdout.write("\r" + fitted(self.figures, doing, shutil.get_terminal_size().columns - 1))
            sys.stdout.flush()

    def _clear(self) -> None:
        if self._enabled and _is_terminal(sys.stdout):
            sys.stdout.write("\r" + " " * (shutil.get_terminal_size().columns - 1) + "\r")
            sys.stdout.flush()


def line(figures: Figures) -> str:
    """One line without a line break; what is not known is left out."""
    of = f"/{figures.iterations}" if figures.iterations is not None else ""
    parts = [f"iteration {figures.iteration}{of}"]
    if figures.stage is not None:
        parts.append(f"stage {figures.stage}")
    if figures.lam is not None:
        parts.append(f"λ {figures.lam:.2f}")
    if figures.success is not None:
        parts.append(f"success {figures.success:.2f}")
    if figures.episodes_per_s is not None:
        parts.append(f"{figures.episodes_per_s:.{0 if figures.episodes_per_s >= 10 else 1}f} episodes/s")
    if figures.left_s is not None:
        parts.append(f"{clock(figures.left_s)} left")
    return " · ".join(parts)


def fitted(figures: Figures, doing: str, width: int) -> str:
    """The line and what is being done in exactly `width` characters; where it is narrow, words go before numbers."""
    short = replace(figures, stage=figures.stage.split()[0] if figures.stage else None)
    forms = (f"{line(figures)} · {doing}", line(figures), line(short).replace("episodes/s", "ep/s"))
    return next((form for form in forms if len(form) <= width), forms[-1])[:width].ljust(width)


def clock(seconds: float) -> str:
    """Seconds as `m:ss` or `h:mm:ss`."""
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def success_of(data: Rollouts, stage: str) -> float | None:
    """The success rate of the stage that was played, rehearsal left out; of all episodes where no stage is known."""
    won, episodes = data.report.success.get(stage, (0, 0))
    return won / episodes if episodes else data.report.metrics.get("rollout/success")


def _stage_label(trainer: pl.Trainer) -> str:
    """The stage as `4/6 search`; empty without a curriculum."""
    curriculum = find(trainer, Curriculum)
    return f"{curriculum.index + 1}/{len(curriculum.stages)} {curriculum.stage.name}" if curriculum else ""


def _passed(trainer: pl.Trainer) -> str:
    curriculum = find(trainer, Curriculum)
    return " (passed)" if curriculum and curriculum.passed else ""


def _path(path: str) -> str:
    return shown(path) if path else ""


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _iterations(trainer: pl.Trainer) -> int | None:
    """The iterations that the run may have; None without a limit."""
    return trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs > 0 else None


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty()
