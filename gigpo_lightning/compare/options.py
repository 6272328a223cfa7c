"""The command line of `compare`: its own options, checked, and those that it hands to every `fit`.

Knows texts only; what the options of `fit` mean is the parser's of `fit`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gigpo_lightning.cli_errors import ShortParser
from gigpo_lightning.suggest import did_you_mean

_UNITS = {"s": 1, "m": 60, "h": 3600}
_MOST_STEPS, _MOST_SECONDS = 1e15, 1e8  # three years: nobody waits for more, and Lightning's clock overflows
_MOST_SEEDS, _MOST_SEED = 1000, 2**32 - 1  # the seeds that Lightning takes
_BUDGET = re.compile(r"(\d+(?:\.\d+)?)\s*(k?)(steps|s|m|h)", re.IGNORECASE)
# Options of fit that compare sets itself, with what to do instead.
_OWN = {
    "--seed_everything": "--seeds chooses the seeds",
    "--data.seed": "--seeds chooses the seeds",
    "--model.policy.init_args.init_seed": "--seeds chooses the seeds",
    "--trainer.default_root_dir": "--out chooses the folder",
    "--runs_dir": "--out chooses the folder",
    "--data.rollout_dir": "every run has its own",
    "--ckpt_path": "an interrupted comparison goes on when the same command is given again",
    "--print_config": "give it to fit",
    "--help": "give it to compare or to fit, outside of variants",
    "-h": "give it to compare or to fit, outside of variants",
}
# Without a dot in their names: options of fit itself.
_OF_FIT = ("--config", "-c", "--trainer", "--data", "--model", "--optimizer", "--weights_only")


@dataclass(frozen=True)
class Budget:
    """What a run may use: environment steps of its training, or seconds; with neither its configuration decides."""

    env_steps: int | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        if self.env_steps is not None:
            return f"{self.env_steps:,} environment steps"
        return "the configuration's" if self.seconds is None else f"{self.seconds / 60:g} minutes"


@dataclass(frozen=True)
class Options:
    """A command line of `compare`, checked as far as texts can be.

    Args:
        algorithms: Names of the overlays `algorithm/NAME.yaml`.
        variants: Files of variants, by name or path.
        seeds: The seeds; empty for all that were run, where only a report is wanted.
        budget: What a run may use.
        evaluate: Stages that are evaluated; empty for the first and the last.
        checks: Evaluations of a run during its training.
        threshold: The success rate whose first crossing is reported.
        jobs: Runs side by side.
        threads: Threads of each.
        out: Folder of the comparison; None for the default.
        dry_run: Whether the commands are only shown.
        report_only: Whether only what there is is reported.
        other_code: Whether runs of other code are accepted.
        fit: What every `fit` is given, too.
    """

    algorithms: tuple[str, ...]
    variants: tuple[str, ...]
    seeds: tuple[int, ...]
    budget: Budget
    evaluate: tuple[str, ...]
    checks: int
    threshold: float
    jobs: int
    threads: int
    out: Path | None
    dry_run: bool
    report_only: bool
    other_code: bool
    fit: tuple[str, ...]


def parse(args: Sequence[str]) -> Options:
    """The options; what is not ours is `fit`'s.

    Raises:
        ValueError: An option is unknown or out of its range.
    """
    parser = command_parser()
    own, rest = parser.parse_known_args(list(args))
    check_rest(rest, [name for action in parser._actions for name in action.option_strings])
    if not (own.algorithms or own.variants or own.report_only):
        raise ValueError("nothing to compare: give --algorithms gigpo,grpo or --variants FILE (--help describes both)")
    return Options(
        algorithms=names(own.algorithms, "--algorithms"),
        variants=names(own.variants, "--variants"),
        seeds=() if own.seeds is None and own.report_only else parse_seeds("3" if own.seeds is None else own.seeds),
        budget=Budget() if own.budget is None else parse_budget(own.budget),
        evaluate=names(own.evaluate, "--evaluate"),
        checks=_count("--checks", own.checks),
        threshold=_share("--threshold", own.threshold),
        jobs=_count("--jobs", own.jobs),
        threads=_count("--threads", own.threads),
        out=Path(own.out) if own.out else None,
        dry_run=own.dry_run,
        report_only=own.report_only,
        other_code=own.other_code,
        fit=tuple(rest),
    )


def parse_budget(text: str) -> Budget:
    """What `20m`, `1.5h`, `90s`, `300000steps` or `300ksteps` means.

    Raises:
        ValueError: It means nothing.
    """
    match = _BUDGET.fullmatch(text.strip().replace("_", "").replace(",", ""))
    unit = match[3].lower() if match else ""
    amount = float(match[1]) if match else 0.0
    if match and unit == "steps":
        steps = amount * (1000 if match[2] else 1)
        if 0.5 < steps <= _MOST_STEPS:
            return Budget(env_steps=round(steps))
    elif match and not match[2] and 0 < amount * _UNITS[unit] <= _MOST_SECONDS:
        return Budget(seconds=amount * _UNITS[unit])
    raise ValueError(
        f"--budget {text}: give a positive time, 20m, 1.5h or 90s, or environment steps, 300000steps or 300ksteps"
    )


def parse_seeds(text: str) -> tuple[int, ...]:
    """`5` is the seeds 0 to 4, `3,7` these two.

    Raises:
        ValueError: No number, none at all, or one given twice.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts) or (len(parts) == 1 and int(parts[0]) < 1):
        raise ValueError(f"--seeds {text}: give how many, at least 1, or the seeds themselves, e.g. 0,1,2")
    if len(parts) == 1 and "," not in text:
        if int(parts[0]) > _MOST_SEEDS:
            raise ValueError(f"--seeds {text}: that many runs of each variant; at most {_MOST_SEEDS}, 5 is usual")
        return tuple(range(int(parts[0])))
    seeds = tuple(int(part) for part in parts)
    if max(seeds) > _MOST_SEED:
        raise ValueError(f"--seeds {text}: {max(seeds)} is more than {_MOST_SEED}, the largest seed")
    twice = [seed for seed in seeds if seeds.count(seed) > 1]
    if twice:
        raise ValueError(f"--seeds {text}: {twice[0]} is given twice")
    return seeds


def names(text: str | None, option: str) -> tuple[str, ...]:
    """The names of a list with commas, each once.

    Raises:
        ValueError: One is empty or given twice.
    """
    if text is None:
        return ()
    found = tuple(part.strip() for part in text.split(","))
    if not all(found):
        raise ValueError(f"{option} {text}: a name is missing; separate them with single commas, without blanks")
    twice = [name for name in found if found.count(name) > 1]
    if twice:
        raise ValueError(f"{option} {text}: {twice[0]} is given twice")
    return found


def check_rest(rest: Sequence[str], own: Sequence[str] = ()) -> None:
    """Refuse options of `fit` that compare sets, and those that are neither's.

    Args:
        rest: What is meant for `fit`.
        own: Options of compare, for suggestions.

    Raises:
        ValueError: The message names the option.
    """
    for arg in rest:
        name = arg.split("=")[0].removesuffix("+")
        if name in _OWN:
            raise ValueError(f"{name}: not for compare: {_OWN[name]}")
        if name.startswith("--") and "." not in name and name not in _OF_FIT:
            raise ValueError(f"unknown option {name}{did_you_mean(name, [*own, *_OF_FIT])}")


def _count(option: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{option} {text}: must be a whole number of at least 1")
    return int(text)


def _share(option: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise ValueError(f"{option} {text}: must be a success rate in (0, 1]")
    return value


def command_parser() -> ShortParser:
    """The parser of its own options; numbers stay texts, so that a bad one is named as it was written."""
    parser = ShortParser(
        prog="python -m gigpo_lightning compare",
        usage="%(prog)s --config FILE (--algorithms A,B,... | --variants FILE) [options] [options of fit]",
        description=(
            "Train several variants with several seeds and compare them. Give the same command again to go on after an "
            "interruption. Options that are not listed here go to every fit."
        ),
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--algorithms", metavar="A,B,...", help="overlays algorithm/NAME.yaml; the first is what others are compared to"
    )
    add("--variants", metavar="FILE", help="a YAML file of variants, or a shipped one: lambda, curriculum, ...")
    add("--seeds", metavar="N", help="how many, 0 to N-1, or the seeds themselves, 3,4,5 (default: 3)")
    add("--budget", help="of each run: 300000steps of its environments, or 20m; default: the configuration's limits")
    add(
        "--evaluate", metavar="STAGES", help="stages whose unseen tasks all runs play (default: the first and the last)"
    )
    add("--checks", default="10", metavar="N", help="evaluations during a run, equally far apart (default: 10)")
    add("--threshold", default="0.5", help="success rate whose first crossing is reported (default: 0.5)")
    add("--jobs", default="1", metavar="N", help="runs side by side (default: 1)")
    add("--threads", default="1", metavar="N", help="threads of each run (default: 1)")
    add("--out", metavar="DIR", help="folder of the comparison (default: runs/compare/<name of the configuration>)")
    add("--dry_run", action="store_true", help="check everything, show the commands and start none")
    add("--report_only", action="store_true", help="start nothing, write the report of what is finished in --out")
    add("--other_code", action="store_true", help="go on although the code has changed since the first run")
    return parser
