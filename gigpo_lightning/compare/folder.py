"""A comparison's folder: what belongs to it, what is finished, and whether a command may go on with it.

    OUT/plan.json                      the code and the options of the first command
    OUT/<variant>/config.yaml          everything about its runs but seed and folder
    OUT/<variant>/seed_<n>/            the folder of a `fit`, with its log, attempts.json, and run.json once finished
    OUT/compare.json, .md, .png        the report

Knows files; starts nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gigpo_lightning.callbacks.learning_curve import FILE as CURVE_FILE
from gigpo_lightning.cli_run import RunFolder, take
from gigpo_lightning.compare.settle import dump
from gigpo_lightning.files import replacing, write_json

PLAN, LOG, ATTEMPTS, RUN = "plan.json", "fit.log", "attempts.json", "run.json"
_NEEDED = {  # what is read of each file
    PLAN: ("command", "budget", "jobs", "threads", "code", "machine", "variants"),
    RUN: ("variant", "seed", "final", "points", "env_steps", "iteration", "seconds", "wall_s", "cpu_s", "peak_bytes"),
    ATTEMPTS: ("attempts",),
}
_SAME = ("code", "threads", "budget")  # of the plan, what all runs share; the rest is how it was last started
_SHOWN = 3  # differences named in a refusal


@dataclass(frozen=True)
class Run:
    """One fit of a comparison."""

    variant: str
    seed: int
    folder: Path

    def __str__(self) -> str:
        return f"{self.variant} seed {self.seed}"

    @property
    def finished(self) -> dict[str, Any] | None:
        """What it came to, or None where it has not come to its end."""
        return _read(self.folder / RUN)

    @property
    def begun(self) -> bool:
        """Whether there is something to resume."""
        return (self.folder / "config.yaml").exists() or any(self.folder.glob("checkpoints/*.ckpt"))

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """The processes that worked on it; one that was killed together with its starter has no end of its own."""
        known = _read(self.folder / ATTEMPTS) or {"attempts": []}
        log = self.folder / LOG
        for attempt in known["attempts"]:
            if "seconds" not in attempt:
                end = log.stat().st_mtime if log.exists() else attempt["started"]
                attempt |= {"seconds": max(0.0, end - attempt["started"]), "cpu_s": None, "exit_code": None}
        found: list[dict[str, Any]] = known["attempts"]
        return found

    def begin(self, **facts: Any) -> None:
        """Note that a process starts to work on it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / ATTEMPTS, {"attempts": [*self.attempts, {"started": time.time(), **facts}]})

    def end(self, **facts: Any) -> None:
        """Note how the latest process has ended."""
        *before, latest = (_read(self.folder / ATTEMPTS) or {})["attempts"]
        write_json(self.folder / ATTEMPTS, {"attempts": [*before, {**latest, **facts}]})

    def conclude(self) -> dict[str, Any]:
        """Write and return what the finished run came to.

        Raises:
            ValueError: A file that a finished run leaves is not there.
        """
        results, curve = _read(self.folder / "results.json"), _read(self.folder / CURVE_FILE)
        if results is None or curve is None:
            raise ValueError(f"{self.folder} lacks {'results.json' if results is None else CURVE_FILE}")
        attempts = self.attempts
        content = {
            "variant": self.variant,
            "seed": self.seed,
            "final": results["results"],
            **curve,
            "wall_s": sum(attempt["seconds"] for attempt in attempts),
            "cpu_s": sum(attempt["cpu_s"] or 0.0 for attempt in attempts),
            "attempts": attempts,
        }
        write_json(self.folder / RUN, content)
        return content

    def last_words(self, lines: int = 5) -> str:
        """The end of its log."""
        log = self.folder / LOG
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        return "\n".join(f"    {line[:300]}" for line in text.strip().splitlines()[-lines:])


def open_folder(out: Path) -> RunFolder:
    """Make the folder where it is missing and lock it, so that two comparisons never share one.

    Raises:
        ValueError: Another comparison works in it, or it cannot be written.
    """
    try:
        return take(out, "--out")
    except OSError as error:
        raise ValueError(f"--out {out}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"--out {error}") from error


def settle_folder(
    out: Path, plan: Mapping[str, Any], configs: Mapping[str, Mapping[str, Any]], other_code: bool
) -> None:
    """Write the plan and the configurations of the variants, or see that they are those that are there.

    Variants and seeds may be added to a comparison; nothing of what is there may change.

    Args:
        out: The folder.
        plan: How the comparison is started: `code`, `threads` and `budget` must be those of before; `variants` are
            their labels by name.
        configs: The configuration of each variant by name.
        other_code: Whether the code may have changed.

    Raises:
        ValueError: It holds a comparison with other options; the message names the difference. Or a file is where the
            runs of a variant must go.
    """
    known = _read(out / PLAN)
    found: list[str] = []
    if known is not None:
        kept = [key for key in _SAME if not (other_code and key == "code")]
        found += _differences({key: known[key] for key in kept}, {key: plan[key] for key in kept})
    for name, config in configs.items():
        path = out / name / "config.yaml"
        if path.parent.exists() and not path.parent.is_dir():
            raise ValueError(f"--out {out}: its {name} is no folder of runs; remove it, or choose another folder")
        if path.exists():
            there = yaml.safe_load(path.read_text(encoding="utf-8"))
            found += [f"{name}: {text}" for text in _differences(there, config)]
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        hint = "; --other_code goes on with changed code" if found[0].startswith("code:") else ""
        raise ValueError(
            f"--out {out} holds a comparison with other options: {'; '.join(found[:_SHOWN])}{more}. Choose another "
            f"folder, or give the options of then{hint}"
        )
    write_json(out / PLAN, {**plan, "variants": {**(known or {}).get("variants", {}), **plan["variants"]}})
    for name, config in configs.items():
        path = out / name / "config.yaml"
        if not path.exists():
            with replacing(path) as partial:
                partial.write_text(dump(config), encoding="utf-8")


def read_plan(out: Path) -> dict[str, Any]:
    """The plan of the comparison in a folder.

    Raises:
        ValueError: There is none.
    """
    plan = _read(out / PLAN)
    if plan is None:
        raise ValueError(f"--out {out}: there is no comparison in it")
    return plan


def begun_runs(out: Path, variants: Sequence[str], seeds: Sequence[int]) -> list[Run]:
    """The runs that have a folder, in the order of `variants` and seeds; of all seeds where none are named."""
    found = []
    for variant in variants:
        numbered = [(path.name.removeprefix("seed_"), path) for path in (out / variant).glob("seed_*")]
        folders = {int(number): path for number, path in numbered if number.isdecimal()}  # no copy of the user's
        found += [Run(variant, seed, folders[seed]) for seed in sorted(folders) if not seeds or seed in seeds]
    return found


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    """What differs between two nested mappings, as `key: … there, … here`."""
    one, other = dict(_flat(there)), dict(_flat(here))
    for key in [*one, *(key for key in other if key not in one)]:
        if key not in one or key not in other or one[key] != other[key]:
            yield f"{key}: {one.get(key, 'nothing')} there, {other.get(key, 'nothing')} here"


def _flat(content: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a nested mapping under their dotted names; classes by name, so that lists are compared by entry."""
    if isinstance(content, Mapping) and content:
        for key, value in content.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
    elif (
        isinstance(content, list)
        and content
        and all(isinstance(item, Mapping) and "class_path" in item for item in content)
    ):
        for item in content:
            name = str(item["class_path"]).rsplit(".")[-1]
            yield from _flat({"class_path": item["class_path"], **(item.get("init_args") or {})}, f"{prefix}.{name}")
    else:
        yield prefix, content


def _read(path: Path) -> dict[str, Any] | None:
    """The content of a JSON file; None where it is missing.

    Raises:
        ValueError: It is damaged, or of another kind.
    """
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of the text or of the JSON
        raise ValueError(f"{path} is damaged ({error}); remove it, and the same command makes it anew") from error
    missing = [key for key in _NEEDED.get(path.name, ()) if not isinstance(content, dict) or key not in content]
    if missing:
        raise ValueError(f"{path}: not a file of compare, it lacks {', '.join(missing)}; choose another folder")
    return dict(content)
