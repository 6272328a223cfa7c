"""How freely the policy explores: temperature and entropy coefficient by schedule, raised for a while by a promotion.

Stateless: the values follow from the datamodule's `iteration` and the promotion that `Curriculum` remembers.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from gigpo_lightning.callbacks.curriculum import Curriculum
from gigpo_lightning.callbacks.seam import Rollouts, find, refuse_given, require_after, rollouts
from gigpo_lightning.functional.schedules import Schedule, boosted, make_schedule


class Exploration(Callback):
    """Set the sampling temperature and the entropy coefficient of each iteration.

    A new stage needs exploration again: n iterations after a promotion a value is
    multiplied by 1 + boost · max(0, 1 − n / N).

    Args:
        temperature: A number, > 0, or a schedule such as `{schedule: linear, start: 1.2, end: 1.0, span: 50}`.
        entropy_coef: A number, ≥ 0, or a schedule.
        temperature_boost: 0.2 raises the temperature by a fifth at a promotion; 0 is off.
        entropy_boost: The same for the entropy coefficient.
        boost_iterations: N, iterations until the boosts are gone.

    Raises:
        ValueError: A schedule that does not exist, or a number out of range.
    """

    def __init__(
        self,
        temperature: float | dict[str, Any] = 1.0,
        entropy_coef: float | dict[str, Any] = 0.0,
        temperature_boost: float = 0.0,
        entropy_boost: float = 0.0,
        boost_iterations: int = 5,
    ) -> None:
        self._temperature = _schedule("temperature", temperature)
        self._entropy = _schedule("entropy_coef", entropy_coef)
        for name, value in (("temperature_boost", temperature_boost), ("entropy_boost", entropy_boost)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"Exploration.{name}={value}: must be ≥ 0 and finite; 0 is off, 0.5 raises by half")
        if boost_iterations < 1:
            raise ValueError(
                f"Exploration.boost_iterations={boost_iterations}: must be ≥ 1; to switch off, set the boosts to 0"
            )
        self.temperature_boost, self.entropy_boost = temperature_boost, entropy_boost
        self.boost_iterations = boost_iterations

    def values(self, iteration: int, promoted_at: int | None) -> tuple[float, float]:
        """Temperature and entropy coefficient of `iteration`, given the first iteration after the latest promotion."""
        since = None if promoted_at is None else iteration - promoted_at
        return (
            boosted(self._temperature(iteration), self.temperature_boost, since, self.boost_iterations),
            boosted(self._entropy(iteration), self.entropy_boost, since, self.boost_iterations),
        )

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse an order in which a promotion would be seen one iteration late."""
        require_after(trainer, self, Curriculum)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Set the values for the first collection."""
        data = rollouts(trainer, self)
        refuse_given(data, self, "temperature", "entropy_coef")
        self.apply(data, _promoted_at(trainer))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the values that were used and set those of the next collection."""
        data = rollouts(trainer, self)
        data.report.metrics["rollout/temperature"] = data.controls.temperature
        data.report.metrics["loss/entropy_coef"] = data.controls.entropy_coef
        self.apply(data, _promoted_at(trainer))

    def apply(self, data: Rollouts, promoted_at: int | None) -> None:
        """The values of the iteration that comes next."""
        data.controls.temperature, data.controls.entropy_coef = self.values(data.iteration, promoted_at)


def _schedule(option: str, value: float | dict[str, Any]) -> Schedule:
    """The schedule that an option names; a plain number is constant. All schedules lie between their ends."""
    options: dict[str, Any] = dict(value) if isinstance(value, dict) else {"schedule": "constant", "start": value}
    try:
        name = options.pop("schedule", None)
        if name is None:
            raise ValueError("`schedule` is missing")
        for key, number in options.items():
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                raise ValueError(f"{key}: {number!r} is not a number")
        made = make_schedule(name, **options)
    except ValueError as error:
        raise ValueError(f"Exploration.{option}={value!r}: {error}") from error
    ends = [options[key] for key in ("start", "end", "minimum") if key in options]
    lowest = "> 0" if option == "temperature" else "≥ 0"
    if any(number < 0 or (number == 0 and option == "temperature") for number in ends):
        raise ValueError(f"Exploration.{option}={value!r}: must stay {lowest}")
    return made


def _promoted_at(trainer: pl.Trainer) -> int | None:
    """What the curriculum says about its latest promotion; None without one."""
    curriculum = find(trainer, Curriculum)
    return curriculum.promoted_at if curriculum else None
