"""The command `plan`: what a run will need, before it is started.

Takes the options of `fit`. The memory is counted without loading weights; then a few iterations are made to see how
long one takes.
"""

from __future__ import annotations

import json
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
from gigpo_lightning.cli_checks import check_options
from gigpo_lightning.cli_plan_needs import CONTEXT_BYTES, Needs, Planner, Setup
from gigpo_lightning.cli_plan_probe import ProbeClock, whole_run
from gigpo_lightning.cli_plan_savings import savings
from gigpo_lightning.cli_plan_split import Split, check_spreadable, split_of
from gigpo_lightning.cli_plan_table import Room, show_memory, show_probe, show_work
from gigpo_lightning.cli_plan_work import works_of
from gigpo_lightning.cli_quiet import quieten, without_details
from gigpo_lightning.cli_ranks import is_one_of_several
from gigpo_lightning.memory import free_memory, parse_size, peak_memory, whole_memory
from gigpo_lightning.placement import settle_precision
from gigpo_lightning.rollout.options import check_processes
from gigpo_lightning.rollout.random_play import Work

# Left out of a probe: they write where the run would, show its progress, or train for minutes before it.
_LEFT_OUT = ("IterationCheckpoint", "IterationProgress", "WarmStart", "EvaluationFiles")
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
# One process is planned, and probed; the others are like it.
_ALONE = {"devices": 1, "strategy": "auto", "num_nodes": 1}


def run_plan(args: Sequence[str]) -> int:
    """Say what a run would need.

    Args:
        args: The command line after `plan`: the options of `fit`, and those of `PlanCLI`.

    Returns:
        0, or 1 where the run does not fit into the memory.
    """
    quieten()
    with without_details(), tempfile.TemporaryDirectory(prefix="gigpo-plan-", ignore_cleanup_errors=True) as folder:
        return PlanCLI(args, Path(folder)).code


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
        self.split = Split()
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
        self._share_out(options)
        changes = {**_PROBE_TRAINER, **_ALONE, "max_epochs": options["iterations"]}
        if self.memory is not None:
            changes["accelerator"] = "cpu"  # another machine's devices need not be here
        for name, value in changes.items():
            trainer[name] = value
        listed = trainer.get("callbacks") or []
        listed = listed if isinstance(listed, list) else [listed]
        trainer["callbacks"] = [c for c in listed if c["class_path"].rsplit(".")[-1] not in _LEFT_OUT]
        options["data"]["rollout_dir"] = None
        options["runs_dir"], options["ckpt_path"] = str(self.folder), None
        super().before_instantiate_classes()

    def _share_out(self, options: Any) -> None:
        """Plan one process of several, with its share of the groups.

        Raises:
            ValueError: There are more processes than groups, or a strategy that a run could not have.
        """
        if is_one_of_several():
            raise ValueError("plan counts one process and needs no other: start it without torchrun or srun")
        check_options(options["trainer"], [])
        self.split = split_of(options["trainer"].as_dict(), elsewhere=self.memory is not None)
        check_processes(options["data"]["groups"], self.split.processes)
        options["data"]["groups"] = self.split.share(options["data"]["groups"])

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """The trainer, with a clock."""
        self.trainer_defaults["callbacks"].append(self.clock)
        trainer = super().instantiate_trainer(**kwargs)
        self.datamodule.skip_zero_advantage = False  # an untrained policy may win nothing: no update would be seen
        return trainer

    # -- the plan ------------------------------------------------------------------------------------------------------

    def _run_subcommand(self, subcommand: str) -> None:
        """Count, show, probe, show."""
        options, module, data = self.config[self.command], self.model, self.datamodule
        settle_precision(self.trainer.strategy)
        check_spreadable(self.split, module.policy)
        self._check_engine()
        room = self._room()
        works, why = works_of(data, module.policy, find(self.trainer, Curriculum))
        evaluated = self.split.share(data.evaluation.tasks * data.evaluation.seeds)
        setup = Setup(
            policy=module.policy,
            tasks=data.tasks,
            optimizer=module._optimizer,
            optimizer_name=_class_name(options["model"].get("optimizer")),
            kl=module.loss.kl_coef > 0,
            rows=min(data.rows, max(data.groups * data.members, evaluated)),
            max_tokens=data.segment_rule.max_tokens,
            micro_tokens=data.max_tokens_per_batch,
            constrain=data.constrain,
            work=max(works.values(), key=lambda work: work.tokens, default=None),
            on_gpu=room.on_gpu,
            precision=str(self.trainer.precision_plugin.precision),
            split=self.split,
            engine=data.player.sampler.options,
            device_bytes=room.whole,
        )
        planner = Planner()
        needs = planner.needs(setup)
        self.code = int(room.verdict_of(needs) == "does not fit")
        helps = savings(planner, setup) if room.verdict_of(needs) != "fits" else []
        show_memory(setup, needs, room, helps)
        show_work(works, why, data.groups * data.members, self.split.processes)
        content = self._content(needs, room, helps, works)
        if options["probe"]:
            content |= self._probe(room, needs)
        if options["json"]:
            Path(options["json"]).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def _room(self) -> Room:
        """The memory that the run will have."""
        if self.memory is not None:
            on_gpu = self.accelerator != "cpu"
            size = self.memory - (CONTEXT_BYTES if on_gpu else 0)
            return Room(size, on_gpu, f"{self.memory / 2**30:.4g} GiB given", self.memory)
        device = self.trainer.strategy.root_device
        whole = whole_memory(device)
        shared = self.split.processes if device.type == "cpu" else 1
        what = "free now" if shared == 1 else f"the share of each of {shared} processes in what is free now"
        return Room(free_memory(device) // shared, device.type == "cuda", what, whole)

    def _check_engine(self) -> None:
        """Refuse what `fit` would; another machine may have what is not installed here."""
        engine = self.datamodule.player.sampler.options
        if engine is None:
            return
        engine.check_processes(self.split.processes)
        (engine.check_policy if self.memory is not None else engine.check)(self.model.policy)

    def _content(self, needs: Needs, room: Room, helps: Any, works: dict[str, Work]) -> dict[str, Any]:
        """The figures as plain values."""
        episodes = self.datamodule.groups * self.datamodule.members
        return {
            "memory": {**asdict(needs), "held": needs.held, "total": needs.total, "unit": "bytes"},
            "room": {"bytes": room.size, "what": room.what, "verdict": room.verdict_of(needs)},
            "processes": self.split.processes,
            "savings": dict(helps),
            "iteration": {
                name: {**asdict(work), "tokens_per_iteration": work.tokens * episodes} for name, work in works.items()
            },
        }

    # -- the probe -----------------------------------------------------------------------------------------------------

    def _probe(self, room: Room, needs: Needs) -> dict[str, Any]:
        """Make a few iterations, unless they would not be those of the run."""
        reason = ""
        if self.memory is not None:
            reason = "it is planned for another machine"
        elif self.code:
            reason = "the run does not fit"
        elif self.split.spread and self.split.processes > 1:
            reason = "one process alone would hold the weights of all; time it with --trainer.devices=1 where they fit"
        if reason:
            print(f"no probe: {reason}")
            return {}
        count = self.trainer.max_epochs
        how = "as in fit" if self.split.processes == 1 else "of one process with its share, the exchange left out"
        print(f"probe: {count} iteration{'s' * (count != 1)} {how}, every row trained (--probe false leaves it out) …")
        sys.stdout.flush()
        self.trainer.fit(self.model, datamodule=self.datamodule)
        if not self.clock.iterations:
            return {}
        seconds = self.clock.seconds()
        data = self.datamodule
        iterations, total_s = whole_run(self.limits, data.passes * data.minibatches, seconds["total"])
        peak = peak_memory(self.trainer.strategy.root_device)
        show_probe(seconds, data.groups * data.members, iterations, total_s, peak, room.on_gpu)
        return {
            "probe": {"seconds_per_iteration": seconds, "peak_bytes": peak},
            "run": {"iterations": iterations, "seconds": total_s},
        }


def _class_name(option: Any) -> str:
    """The name of the class that an option chooses."""
    path = option if isinstance(option, str) or option is None else option.get("class_path")
    return str(path or "AdamW").rsplit(".")[-1]
