"""The command `plan`: what a run will need, before it is started.

Takes the options of `fit`. The memory is counted without loading weights; then a few iterations are made to see how
long one takes.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.cli import LightningArgumentParser

from gigpo_lightning.callbacks.curriculum import Curriculum
from gigpo_lightning.callbacks.seam import find
from gigpo_lightning.cli import GiGPOCLI
from gigpo_lightning.cli_plan_needs import CONTEXT_BYTES, Needs, Planner, Setup
from gigpo_lightning.cli_plan_probe import ProbeClock, measured_peak, whole_run
from gigpo_lightning.cli_plan_table import Room, show_memory, show_probe, show_work
from gigpo_lightning.cli_quiet import quieten
from gigpo_lightning.curriculum import Stage
from gigpo_lightning.memory import free_memory, parse_size
from gigpo_lightning.policy.causal_lm import CausalLMPolicy
from gigpo_lightning.policy.pretrained import load_config
from gigpo_lightning.rollout.pool import InProcessPool
from gigpo_lightning.rollout.random_play import Work, play_at_random

# Episodes played at random to count tokens.
_EPISODES = 16
# Left out of a probe: they write where the run would, show its progress, or train for minutes before it.
_LEFT_OUT = ("IterationCheckpoint", "IterationProgress", "WarmStart", "EvaluationFiles")

# They tell of seeds and devices, which are no part of a plan.
_TALKATIVE = ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed")
# The trainer of a probe: iterations only.
_PROBE_TRAINER = {
    "max_steps": -1,
    "max_time": None,
    "default_root_dir": None,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
# Another machine's devices need not be here.
_HERE = {"accelerator": "cpu", "devices": 1, "strategy": "auto", "num_nodes": 1}


def run_plan(args: Sequence[str]) -> int:
    """Say what a run would need.

    Args:
        args: The command line after `plan`: the options of `fit`, and those of `PlanCLI`.

    Returns:
        0, or 1 where the run does not fit into the memory.
    """
    quieten()
    folder = tempfile.mkdtemp(prefix="gigpo-plan-")
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        return PlanCLI(args, Path(folder)).code
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class PlanCLI(GiGPOCLI):
    """The command line of `fit`, which plans instead.

    Args:
        args: The command line after `plan`.
        folder: Where the probe writes; to be removed afterwards.
    """

    def __init__(self, args: Sequence[str], folder: Path) -> None:
        self.folder, self.code = folder, 0
        self.clock = ProbeClock()
        self.limits: dict[str, Any] = {}
        self.accelerator: str = "auto"
        super().__init__("fit", args)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options of the plan."""
        super().add_arguments_to_parser(parser)
        parser.usage = "python -m gigpo_lightning plan [--config FILE ...] [options of fit] [options of plan]"
        parser.description = "Say what a run would need, before it is started."
        parser.add_argument("--probe", type=bool, default=True, help="Make a few iterations to see how long one takes.")
        parser.add_argument("--iterations", type=int, default=2, help="Iterations of the probe.")
        parser.add_argument(
            "--memory",
            type=str | None,
            default=None,
            help="Memory of another machine's device, such as 24GiB, to plan for it; there is no probe then.",
        )
        parser.add_argument("--json", type=str | None, default=None, help="File to write the figures into.")

    # -- options -------------------------------------------------------------------------------------------------------

    def before_instantiate_classes(self) -> None:
        """Turn the run into a probe of itself that writes into a folder of its own."""
        options = self.config[self.command]
        if options["iterations"] < 1:
            raise ValueError(f"--iterations={options['iterations']}: must be at least 1")
        trainer = options["trainer"]
        self.limits = {name: trainer.get(name) for name in ("max_epochs", "max_steps", "max_time")}
        self.accelerator = str(trainer.get("accelerator"))
        self.memory = None if options["memory"] is None else parse_size(options["memory"])
        changes = {**_PROBE_TRAINER, "max_epochs": options["iterations"], **(_HERE if self.memory is not None else {})}
        for name, value in changes.items():
            trainer[name] = value
        listed = trainer.get("callbacks") or []
        listed = listed if isinstance(listed, list) else [listed]
        trainer["callbacks"] = [c for c in listed if c["class_path"].rsplit(".")[-1] not in _LEFT_OUT]
        options["data"]["rollout_dir"] = None
        options["data"]["skip_zero_advantage"] = (
            False  # an untrained policy may win nothing, and no update would be seen
        )
        options["runs_dir"], options["ckpt_path"] = str(self.folder), None
        super().before_instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """The trainer, with a clock."""
        self.trainer_defaults["callbacks"].append(self.clock)
        return super().instantiate_trainer(**kwargs)

    # -- the plan ------------------------------------------------------------------------------------------------------

    def _run_subcommand(self, subcommand: str) -> None:
        """Count, show, probe, show."""
        options, module, data = self.config[self.command], self.model, self.datamodule
        room = self._room()
        works, why = self._works()
        setup = Setup(
            policy=module.policy,
            tasks=data.tasks,
            optimizer=module._optimizer,
            optimizer_name=_class_name(options["model"].get("optimizer")),
            kl=module.loss.kl_coef > 0,
            rows=min(data.rows, max(data.groups * data.members, data.evaluation.tasks * data.evaluation.seeds)),
            max_tokens=data.segment_rule.max_tokens,
            micro_tokens=data.max_tokens_per_batch,
            constrain=data.constrain,
            work=max(works.values(), key=lambda work: work.tokens, default=None),
            on_gpu=room.on_gpu,
        )
        planner = Planner()
        needs = planner.needs(setup)
        self.code = int(needs.total > room.size)
        savings = planner.savings(setup) if room.verdict(needs.total) != "fits" else []
        show_memory(setup, needs, room, savings)
        show_work(works, why, data.groups * data.members)
        content = self._content(needs, room, savings, works)
        if options["probe"]:
            content |= self._probe(room, needs)
        if options["json"]:
            Path(options["json"]).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def _room(self) -> Room:
        """The memory that the run will have."""
        if self.memory is not None:
            on_gpu = self.accelerator != "cpu"
            return Room(self.memory - (CONTEXT_BYTES if on_gpu else 0), on_gpu, f"{self.memory / 2**30:.4g} GiB given")
        device = self.trainer.strategy.root_device
        return Room(free_memory(device), device.type == "cuda", "free now")

    def _works(self) -> tuple[dict[str, Work], str]:
        """What an episode of the first and of the last stage comes to; else why that is not known."""
        data, policy = self.datamodule, self.model.policy
        stages = [Stage(name="all", max_turns=data.max_turns)]
        curriculum = find(self.trainer, Curriculum)
        if curriculum is not None:
            stages = [curriculum.stage, *curriculum.stages[-1:]]
        if isinstance(policy, CausalLMPolicy):
            load_config(policy.source, policy.revision)  # without it there is nothing to plan
            try:
                policy.load_prompt()
            except ValueError as error:
                return {}, str(error)
        else:
            policy.prepare(data.tasks)
        return {stage.name: self._work(stage) for stage in stages}, ""

    def _work(self, stage: Stage) -> Work:
        data, tasks = self.datamodule, self.datamodule.stage_tasks(stage)
        pool = InProcessPool(data.tasks.make_env)
        try:
            return play_at_random(
                self.model.policy.prompt,
                pool,
                [tasks.get("train", i) for i in range(min(_EPISODES, tasks.len("train")))],
                data.segment_rule,
                max_turns=stage.max_turns,
                constrain=data.constrain,
                max_action_tokens=data.max_action_tokens,
                seed=data.seed,
            )
        finally:
            pool.close()

    def _content(self, needs: Needs, room: Room, savings: Any, works: dict[str, Work]) -> dict[str, Any]:
        """The figures as plain values."""
        episodes = self.datamodule.groups * self.datamodule.members
        return {
            "memory": {**asdict(needs), "held": needs.held, "total": needs.total, "unit": "bytes"},
            "room": {"bytes": room.size, "what": room.what, "verdict": room.verdict(needs.total)},
            "savings": dict(savings),
            "iteration": {
                name: {**asdict(work), "tokens_per_iteration": work.tokens * episodes} for name, work in works.items()
            },
        }

    # -- the probe -----------------------------------------------------------------------------------------------------

    def _probe(self, room: Room, needs: Needs) -> dict[str, Any]:
        """Make a few iterations, unless they would not be those of the run."""
        if self.memory is not None or needs.total > room.size:
            reason = "it is planned for another machine" if self.memory is not None else "the run does not fit"
            print(f"no probe: {reason}")
            return {}
        count = self.trainer.max_epochs
        plural = "s" * (count != 1)
        print(f"probe: {count} iteration{plural} as in fit, every row trained (--probe false leaves this out) …")
        sys.stdout.flush()
        self.trainer.fit(self.model, datamodule=self.datamodule)
        if not self.clock.iterations:
            return {}
        seconds = self.clock.seconds()
        data = self.datamodule
        iterations, total_s = whole_run(self.limits, data.passes * data.minibatches, seconds["total"])
        peak = measured_peak(self.trainer.strategy.root_device)
        show_probe(seconds, data.groups * data.members, iterations, total_s, peak, room.on_gpu)
        return {
            "probe": {"seconds_per_iteration": seconds, "peak_bytes": peak},
            "run": {"iterations": iterations, "seconds": total_s},
        }


def _class_name(option: Any) -> str:
    """The name of the class that an option chooses."""
    path = option if isinstance(option, str) or option is None else option.get("class_path")
    return str(path or "AdamW").rsplit(".")[-1]
