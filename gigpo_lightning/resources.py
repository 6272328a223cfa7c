"""The YAML files that travel with the package: `configs/` and `curricula/`, in a wheel and in a checkout alike."""

from __future__ import annotations

from pathlib import Path

from gigpo_lightning.suggest import did_you_mean

_PACKAGE = Path(__file__).resolve().parent


def shipped_dir(kind: str) -> Path:
    """The folder of the shipped files of a kind.

    Args:
        kind: `configs`, `configs/ablations` or `curricula`.

    Raises:
        FileNotFoundError: The installation lacks the folder.
    """
    inside = _PACKAGE / kind
    if inside.is_dir():
        return inside
    checkout = _PACKAGE.parent
    # Next to an installed package lie other packages' folders: only a checkout of this one counts.
    if (checkout / "pyproject.toml").is_file() and (checkout / kind).is_dir():
        return checkout / kind
    raise FileNotFoundError(
        f"the folder {kind}/ is missing from this installation of gigpo_lightning: install it again"
    )


def shipped_files(kind: str) -> list[str]:
    """The names of the shipped files of a kind, relative to their folder and sorted, e.g. `policy/scratch.yaml`.

    The variants in `configs/ablations` are a kind of their own: `fit` cannot read them.
    """
    folder = shipped_dir(kind)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.yaml"))
    return [name for name in names if not name.startswith("ablations/")]


def find_file(kind: str, name: str) -> Path:
    """The file a user means by `name`: in the working folder first, then among the shipped ones.

    Both are tried with and without `.yaml`. `curricula/alfworld` is the shipped `alfworld`, too: that name is never
    mistaken for a configuration `alfworld.yaml` in the working folder.

    Args:
        kind: `configs` or `curricula`.
        name: A path, or the name of a shipped file with or without `kind/` before it.

    Raises:
        ValueError: There is no such file; the message lists the shipped ones and the likely one.
    """
    names = [name] if name.endswith((".yaml", ".yml", ".json")) else [name, f"{name}.yaml"]
    shipped_names = [candidate.removeprefix(f"{kind}/") for candidate in names]
    for folder, candidates in ((Path(), names), (shipped_dir(kind), shipped_names)):
        for candidate in candidates:
            if (folder / candidate).is_file():
                return folder / candidate
    shipped = shipped_files(kind)
    hint = did_you_mean(shipped_names[-1], shipped)
    raise ValueError(f"{name}: no such file in {Path.cwd()} nor among the shipped {kind}{hint} ({', '.join(shipped)})")
