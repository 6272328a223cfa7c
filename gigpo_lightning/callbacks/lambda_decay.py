"""λ, the share of the episode advantage in the combined one, as a schedule of the iteration.

Stateless: the value follows from the datamodule's `iteration`, so a resume needs nothing from here.
"""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from gigpo_lightning.callbacks.seam import Rollouts, refuse_given, rollouts
from gigpo_lightning.functional.schedules import make_schedule


class LambdaDecay(Callback):
    """Set λ for each iteration k.

    Args:
        schedule: `published` is max(end, start − k / span), with 1, 0.5 and 100 by default; `constant` (start);
            `linear`, `cosine` and `exponential` go from start to end and need all three numbers.
        start: λ at k = 0, in [0, 1]; 1 is GRPO, 0 the step advantage alone.
        end: The λ that it falls to, in [0, 1].
        span: Number of iterations to get there; for `published` the number in which λ would fall by 1.

    Raises:
        ValueError: An unknown schedule, a number out of range, missing or of no use to the schedule.
    """

    def __init__(
        self,
        schedule: str = "published",
        start: float | None = None,
        end: float | None = None,
        span: float | None = None,
    ) -> None:
        for name, value in (("start", start), ("end", end)):
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"LambdaDecay.{name}={value}: must be a λ, in [0, 1]")
        given = {"start": start, "minimum" if schedule == "published" else "end": end, "span": span}
        try:
            self._lam = make_schedule(schedule, **{name: value for name, value in given.items() if value is not None})
        except ValueError as error:
            # What the published schedule falls to is its `minimum`, but `end` to the user.
            raise ValueError("LambdaDecay." + str(error).replace("minimum: ", "end: ")) from None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Set λ for the first collection."""
        data = rollouts(trainer, self)
        refuse_given(data, self, "lam")
        self.apply(data)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the λ that was used and set that of the next collection."""
        data = rollouts(trainer, self)
        data.report.metrics.setdefault("credit/lambda", data.controls.lam)
        self.apply(data)

    def apply(self, data: Rollouts) -> None:
        """λ of the iteration that comes next."""
        data.controls.lam = self._lam(data.iteration)
