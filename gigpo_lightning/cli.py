"""The commands fit, validate, test and predict: LightningCLI with named configurations, run folders and short errors.

What is trained, and on what, is the module's and the datamodule's; this file only wires them to the command line.
"""

from __future__ import annotations

import inspect
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.model_helpers import is_overridden

# Imported for their names: a class that is loaded can be written in YAML without its module.
import gigpo_lightning.detectors
import gigpo_lightning.envs.alfworld.tasks
import gigpo_lightning.policy.causal_lm
import gigpo_lightning.policy.scratch
import gigpo_lightning.policy.vllm  # noqa: F401
from gigpo_lightning.callbacks import EvaluationFiles
from gigpo_lightning.callbacks.time_limit import TimeLimit
from gigpo_lightning.cli_checks import check_nulls, check_options, check_parts
from gigpo_lightning.cli_config import resolve_configs, run_name, saved_config
from gigpo_lightning.cli_errors import fail, option_message, show_traceback
from gigpo_lightning.cli_faults import Constructors, end_if_left_alone, is_bad_input, message
from gigpo_lightning.cli_interrupt import end_by, signal_of, sigterm_ends
from gigpo_lightning.cli_logger import RunLogger
from gigpo_lightning.cli_place import Place, agreed_place, checkpoint_folder, place_run
from gigpo_lightning.cli_quiet import quieten
from gigpo_lightning.cli_ranks import forget, rank
from gigpo_lightning.datamodule import RolloutDataModule
from gigpo_lightning.detectors.base import Detector
from gigpo_lightning.envs.base import TaskSet
from gigpo_lightning.module import GiGPOModule
from gigpo_lightning.paths import shown
from gigpo_lightning.policy.base import BasePolicy
from gigpo_lightning.policy.critic import CriticRule
from gigpo_lightning.policy.engine_options import EngineOptions
from gigpo_lightning.rollout.replay import ReplayRule

# Groups of options that may be null: the parser does not list what is in them.
_RULES = {"model.critic": CriticRule, "data.replay": ReplayRule}
# What a checkpoint holds: that of any module, what is added by ours, and what only training needs.
_ENTRIES = ("state_dict", "pytorch-lightning_version")
_OUR_ENTRIES = ("policy_identity", "RolloutDataModule")
_TRAINING_ENTRIES = ("loops", "callbacks", "optimizer_states", "lr_schedulers")


def run(command: str, args: Sequence[str]) -> None:
    """Run a command of LightningCLI; bad input exits with 2 after one message.

    Args:
        command: `fit`, `validate`, `test` or `predict`.
        args: The rest of the command line.
    """
    quieten()
    GiGPOCLI(command, args)


class GiGPOCLI(LightningCLI):
    """LightningCLI for one command.

    A run is kept in `<runs_dir>/<name of the first config>/version_<k>`, or in `trainer.default_root_dir` where that is
    given. An error is shown in short where it is bad input; other errors keep their traceback.

    Args:
        command: `fit`, `validate`, `test` or `predict`.
        args: The rest of the command line.
        model_class: The LightningModule.
        datamodule_class: The LightningDataModule.
    """

    @sigterm_ends()
    def __init__(
        self,
        command: str,
        args: Sequence[str],
        model_class: type[pl.LightningModule] = GiGPOModule,
        datamodule_class: type[pl.LightningDataModule] = RolloutDataModule,
    ) -> None:
        self.command, self.args = command, list(args)
        self.place: Place | None = None
        self.begun = _Begun()
        self.files = EvaluationFiles()
        self.constructors = Constructors()
        try:
            self.args, self.config_paths = resolve_configs(self.args)
            if not self.config_paths:
                self.args, self.config_paths = resolve_configs([*saved_config(self.args), *self.args])
            _Parser.configs, _Parser.given = self.config_paths, self.args
            super().__init__(
                model_class,
                datamodule_class,
                save_config_callback=_SaveConfigLate,
                save_config_kwargs={"overwrite": True},  # the folder is this run's own
                trainer_defaults={"callbacks": [self.begun]},
                parser_class=_Parser,
                # a shortened option is most likely a misspelt one
                parser_kwargs={"prog": "python -m gigpo_lightning", "allow_abbrev": False},
                seed_everything_default=0,
                auto_configure_optimizers=False,
            )
        except BaseException as error:
            forget()
            self._end_others()
            if self.place is not None:
                self.place.folder.discard()
            number = signal_of(error)
            if number is not None:
                end_by(number, command, args, self.place.folder.path if self.place else None, say=rank() == 0)
            if isinstance(error, Exception):
                self._end_if_bad_input(error)
            raise
        finally:
            if self.place is not None:
                self.place.folder.release()

    # -- command line --------------------------------------------------------------------------------------------------

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Only the chosen command: a parser takes a second to build."""
        return {self.command: LightningCLI.subcommands()[self.command]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options that are neither the trainer's nor the module's."""
        parser.add_argument(
            "--runs_dir",
            type=str,
            default="runs",
            help="Folder of all runs, each in <config name>/version_<k> inside it.",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the command line that was given to this object."""
        self.config = parser.parse_args([self.command, *self.args])

    def _parse_ckpt_path(self) -> None:
        """Nothing: Lightning would let the checkpoint's options override those on the command line."""

    def _add_instantiators(self) -> None:
        super()._add_instantiators()
        # jsonargparse buries an error of a constructor in a list of types that did not fit: keep the error itself.
        self.parser.add_instantiator(self.constructors.build, object, subclasses=True)

    # -- the run's place -----------------------------------------------------------------------------------------------

    def before_instantiate_classes(self) -> None:
        """Choose the folder and the checkpoint; the saved configuration stays free of both."""
        options = self.config[self.command]
        for part, made in (("model", self.model_class), ("data", self.datamodule_class)):
            check_nulls(made, options.get(part).as_dict(), part)
        wanted, options["ckpt_path"] = options.get("ckpt_path"), None
        options["weights_only"] = True  # a checkpoint is data: nothing in it may be executed
        fitting = self.command == "fit"
        ours = issubclass(self.model_class, GiGPOModule)  # type: ignore[arg-type]
        self.place = agreed_place(
            lambda: place_run(
                self.command,
                Path(options["runs_dir"]) / run_name(self.config_paths),
                given_folder=options["trainer"].get("default_root_dir"),
                wanted=wanted,
                checkpoints=checkpoint_folder(options["trainer"].get("callbacks")),
                entries=_ENTRIES + _OUR_ENTRIES * ours + _TRAINING_ENTRIES * fitting,
            )
        )
        if not fitting and wanted is None:
            rank_zero_only(print)(
                f"warning: {self.command} without --ckpt_path plays the policy as it is before any training; "
                "--ckpt_path best, last or a file chooses a trained one",
                file=sys.stderr,
            )

    def after_instantiate_classes(self) -> None:
        """Hand the chosen checkpoint to the trainer's method."""
        assert self.place is not None
        self.config_init[self.command]["ckpt_path"] = self.place.checkpoint

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """The trainer, writing into the run's folder."""
        assert self.place is not None
        options = self._get(self.config_init, "trainer")
        listed = options.get("callbacks") or []
        listed = listed if isinstance(listed, list) else [listed]
        check_options(options, listed)
        if self.command == "fit":
            check_parts(self.model, self.datamodule, listed)
        self.files = next((callback for callback in listed if isinstance(callback, EvaluationFiles)), self.files)
        if self.files not in listed:
            self.trainer_defaults["callbacks"].append(self.files)
        if options.get("max_time") is not None:  # Lightning would cut the iteration that is under way in two
            self.trainer_defaults["callbacks"].append(TimeLimit(options["max_time"]))
            kwargs["max_time"] = None
        folder = self.place.folder.path
        if options.get("logger") in (None, True):
            logger = RunLogger(folder.parent, name="", version=folder.name, default_hp_metric=False)
            kwargs["logger"] = logger
        return super().instantiate_trainer(default_root_dir=str(folder), **kwargs)

    # -- after the run -------------------------------------------------------------------------------------------------

    def after_fit(self) -> None:
        """Evaluate the trained weights on unseen tasks and say where everything is."""
        assert self.place is not None
        best = self.trainer.checkpoint_callback
        path = getattr(best, "best_model_path", "") or getattr(best, "last_model_path", "") or None
        if is_overridden("test_step", self.model) and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            self.trainer.test(self.model, datamodule=self.datamodule, ckpt_path=path, weights_only=True)
        if self.trainer.is_global_zero:  # the last lines of the run, so that they are found
            print(f"checkpoint:  {shown(path) if path else 'none was written'}")
            print(f"TensorBoard: tensorboard --logdir {shown(self.place.folder.path)}")
            print(f"results:     {shown(self.files.results) if self.files.results else 'none were written'}")

    def after_test(self) -> None:
        """Say where the results are."""
        if self.files.results is not None:
            print(f"results:     {shown(self.files.results)}")

    after_validate = after_test

    def after_predict(self) -> None:
        """Say where the transcripts are."""
        if self.files.transcripts and self.trainer.is_global_zero:
            print(f"transcripts: {len(self.files.transcripts)} in {shown(self.files.transcripts[0].parent)}")

    # -- errors --------------------------------------------------------------------------------------------------------

    def _end_if_bad_input(self, error: Exception) -> None:
        """End with one message if the error is bad input."""
        end_if_left_alone(error, rank())
        cause = self.constructors.cause(error)
        if is_bad_input(cause, self.begun.yes) and not show_traceback():
            where = self.place.folder.path if self.place is not None else None
            fail((f"process {rank()}: " if rank() else "") + message(cause, where))

    def _end_others(self) -> None:
        """End the processes that Lightning has started: they would wait for this one."""
        launcher = getattr(getattr(getattr(self, "trainer", None), "strategy", None), "launcher", None)
        if launcher is not None:
            launcher.kill(signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL)


class _Begun(pl.Callback):
    """Whether the trainer has begun its work; what fails before lies in the options."""

    def __init__(self) -> None:
        self.yes = False

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The validation before training begins."""
        self.yes = True

    on_train_start = on_validation_start = on_test_start = on_predict_start = on_sanity_check_start


class _SaveConfigLate(SaveConfigCallback):
    """Writes `config.yaml` when the first batch is near: a refused command changes nothing in a run's folder."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Nothing: a checkpoint that is loaded later may still be refused."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Checkpoint and loaders are accepted."""
        super().setup(trainer, pl_module, str(trainer.state.stage))

    on_validation_start = on_test_start = on_predict_start = on_train_start


class _Parser(LightningArgumentParser):
    """The parser with one short message in place of usage, tip and error."""

    configs: Sequence[Path] = ()
    given: Sequence[str] = ()

    def error(self, message: str, ex: Exception | None = None) -> Any:
        """End with the readable form of the parser's message."""
        if show_traceback() and ex is not None:
            raise ex
        parsers = [self, *getattr(self._subcommands_action, "choices", {}).values()]
        options = {name for parser in parsers for name in parser._option_string_actions}
        classes = _subclasses(pl.Callback, BasePolicy, Detector, EngineOptions, TaskSet)
        options |= {name for cls in classes for name in inspect.signature(cls).parameters}
        options |= {f"--{key}.{name}" for key, rule in _RULES.items() for name in inspect.signature(rule).parameters}
        names = sorted(cls.__name__ for cls in classes)
        fail(option_message(message, sorted(options), names, _Parser.configs, _Parser.given))


def _subclasses(*bases: type) -> list[type]:
    """All loaded classes below `bases` that a user may name."""
    below: list[type] = []
    for base in bases:
        below += base.__subclasses__()
    return [cls for cls in below if not cls.__name__.startswith("_")] + (_subclasses(*below) if below else [])
