"""The command `compare`: from its command line to the report. Puts the parts together; what each does is theirs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from gigpo_lightning.cli_config import resolve_configs, run_name
from gigpo_lightning.cli_interrupt import INTERRUPTED
from gigpo_lightning.compare.folder import Run, begun_runs, open_folder, read_plan, settle_folder
from gigpo_lightning.compare.options import Options, parse
from gigpo_lightning.compare.picture import draw
from gigpo_lightning.compare.report import markdown, summary
from gigpo_lightning.compare.runner import Runner, fit_command
from gigpo_lightning.compare.settle import settle
from gigpo_lightning.compare.variants import collect
from gigpo_lightning.files import write_json
from gigpo_lightning.machine import code_digest, machine

_NEEDED = ("scipy", "matplotlib")
_CHANGED = "the code of gigpo_lightning has changed since this comparison was started (--other_code accepts that)"


def run_compare(args: Sequence[str]) -> int:
    """Run what is missing of a comparison and report it.

    Args:
        args: The command line after `compare`.

    Returns:
        0; 1 where a run failed; 130 after an interruption.

    Raises:
        ValueError: Bad options, or a folder that does not fit them.
    """
    options = parse(args)
    check_packages()
    out = options.out or _default_out(options)
    if options.report_only:
        return report(out, [v.name for v in collect(options.algorithms, options.variants)], options)
    variants = collect(options.algorithms, options.variants)
    print(f"checking {len(variants)} variants …", flush=True)
    configs = {variant.name: settle(variant, options) for variant in variants}
    # The first seed of all variants comes first, so that what is there after a part of the time can be compared.
    runs = [Run(v.name, seed, out / v.name / f"seed_{seed}") for seed in options.seeds for v in variants]
    if options.dry_run:
        return _show(runs, configs)
    command = shlex.join(["python", "-m", "gigpo_lightning", "compare", *args])
    labels = {variant.name: variant.label for variant in variants}
    runner = _run(out, options, labels, configs, runs, command)
    code = report(out, [variant.name for variant in variants], options)
    if runner.stopped:
        left = sum(run.finished is None for run in runs)
        print(f"{runner.stopped}: {left} of {len(runs)} runs are not finished; the same command goes on with them")
        return INTERRUPTED
    return 1 if runner.failed else code


def _run(
    out: Path,
    options: Options,
    labels: Mapping[str, str],
    configs: Mapping[str, Any],
    runs: Sequence[Run],
    command: str,
) -> Runner:
    """Work off the runs that are not finished, in a folder that nobody else works in meanwhile."""
    code, place = code_digest(), machine("lightning", "transformers")
    folder = open_folder(out)
    try:
        plan = {"code": code, "threads": options.threads, "budget": str(options.budget)}
        plan |= {"command": command, "jobs": options.jobs, "machine": place, "variants": labels}
        settle_folder(out, plan, configs, options.other_code)
        runner = Runner(
            configs,
            jobs=options.jobs,
            threads=options.threads,
            facts={"code": code, "commit": place["commit"]},
            unchanged=lambda: "" if options.other_code or code_digest() == code else _CHANGED,
        )
        runner.work([run for run in runs if run.finished is None])
    finally:
        folder.release()
    return runner


def report(out: Path, names: Sequence[str], options: Options) -> int:
    """Write the report of the finished runs and show its tables.

    Args:
        out: The folder of the comparison.
        names: The variants; empty for all.
        options: Seeds (those that were run where the report alone is asked for) and threshold.

    Returns:
        0, or 1 where no run is finished.

    Raises:
        ValueError: There is no comparison in the folder.
    """
    plan = read_plan(out)
    names = list(names) or list(plan["variants"])
    runs = begun_runs(out, names, options.seeds)
    finished = [content for run in runs if (content := run.finished) is not None]
    if not finished:
        print(f"{out} holds no finished run yet")
        return 1
    labels = {name: plan["variants"].get(name, name) for name in names}
    whole = {
        **{key: plan[key] for key in ("command", "budget", "jobs", "threads", "code", "machine")},
        "missing": [str(run) for run in runs if run.finished is None],
        **summary(finished, labels, options.threshold),
        "configs": {name: _config(out, name) for name in names},
    }
    write_json(out / "compare.json", whole)
    text = markdown(whole)
    (out / "compare.md").write_text(text, encoding="utf-8")
    draw(whole, out / "compare.png")
    print(f"\n{text}\nreport: {out / 'compare.md'}, compare.json and compare.png beside it")
    return 0


def check_packages() -> None:
    """Refuse before hours of runs what would fail after them.

    Raises:
        ValueError: A package is missing.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise ValueError(f"compare needs {' and '.join(missing)}: pip install 'gigpo-lightning[compare]'")


def _default_out(options: Options) -> Path:
    """`runs/compare/<name of the first configuration>`."""
    return Path("runs", "compare", run_name(resolve_configs(options.fit)[1]))


def _show(runs: Sequence[Run], configs: Mapping[str, Any]) -> int:
    """Print the commands."""
    for run in runs:
        state = "# finished: " if run.finished is not None else ""
        print(state + shlex.join(["python", *fit_command(run, configs[run.variant])[1:]]))
    return 0


def _config(out: Path, name: str) -> dict[str, Any] | None:
    path = out / name / "config.yaml"
    loaded: dict[str, Any] | None = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None
    return loaded
