"""README and docs: every command they show is accepted, every link resolves, the example world trains."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

import gigpo_lightning
from benchmarks import learning_curves
from gigpo_lightning import __main__
from gigpo_lightning.callbacks import views
from gigpo_lightning.curriculum import load_stages
from gigpo_lightning.envs.alfworld.check import run_check
from gigpo_lightning.envs.alfworld.files import run_make
from gigpo_lightning.envs.alfworld.tasks import GeneratedTasks
from gigpo_lightning.rollout.store import SCHEMA

ROOT = Path(gigpo_lightning.__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md"]
pytestmark = pytest.mark.skipif(not PAGES[0].is_file(), reason="needs the source checkout")
# Missing as long as the README's table is not filled in.
MADE_BY_BENCHMARKS = ("docs/learning_curves.png", "docs/learning_curves.json")


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def named_blocks(page: Path) -> dict[str, str]:
    """The code blocks that open with a comment that is a file name."""
    found = [block for language in ("python", "yaml") for block in blocks(page, language)]
    return {match[1]: block for block in found if (match := re.match(r"# (\S+\.(?:py|yaml))\n", block))}


def commands() -> list[list[str]]:
    """Every command line of all `sh` blocks, optional parts in brackets included."""
    lines = [line for page in PAGES for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()]
    parts = [part for line in lines for part in line.partition("  #")[0].split("&&")]
    return [shlex.split(part) if "'" in part else shlex.split(re.sub(r"[\[\]]", "", part)) for part in parts]


def anchors(page: Path) -> set[str]:
    """The targets `#…` of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# -- commands ----------------------------------------------------------------------------------------------------------


def test_the_two_commands_are_on_the_first_screen() -> None:
    first = blocks(ROOT / "README.md", "sh")[0].splitlines()
    assert first == [
        "pip install -c constraints.txt . && python -m gigpo_lightning fit --config alfworld.yaml",
        "pip install -c constraints.txt '.[test]' && pytest",
    ]
    screen = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:40]
    assert any(line.startswith("![") for line in screen) and any("does not do" in line for line in screen)


def test_every_command_of_the_trainer_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `--print_config`: parsing checks names and types, and finds the configurations; nothing is started."""
    write_examples(tmp_path)
    Path(tmp_path / "mine.yaml").write_text("data: {groups: 4}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    shown = [command for command in commands() if command[1:3] == ["-m", "gigpo_lightning"]]
    trainers = [command[3:] for command in shown if command[3] in __main__.TRAINER_COMMANDS]
    assert ["fit", "--config", "alfworld.yaml"] in trainers and len(trainers) >= 5
    for arguments in trainers:
        with pytest.raises(SystemExit) as end:
            __main__.main([*arguments, "--print_config"])
        printed = capsys.readouterr()
        assert end.value.code == 0, (arguments, printed.err)
        assert yaml.safe_load(printed.out)["model"]["policy"]["class_path"].endswith("Policy")


def test_every_piece_of_yaml_is_an_overlay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_examples(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    pieces = [block for page in PAGES for block in blocks(page, "yaml")]
    assert len(pieces) >= 3
    curricula = [piece for piece in pieces if "stages" in yaml.safe_load(piece)]
    assert len(curricula) == 3
    for piece in curricula:
        (tmp_path / "mine.yaml").write_text(piece, encoding="utf-8")
        for stage in load_stages("mine.yaml"):  # and the world has tasks for it
            GeneratedTasks().narrow(stage.difficulty)
    for number, piece in enumerate(piece for piece in pieces if piece not in curricula):
        (tmp_path / f"piece{number}.yaml").write_text(piece, encoding="utf-8")
        with pytest.raises(SystemExit) as end:
            __main__.main(["fit", "--config", "alfworld", "--config", f"piece{number}", "--print_config"])
        assert end.value.code == 0, (piece, capsys.readouterr().err)


def test_the_commands_of_alfworld_are_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = [command[3:] for command in commands() if command[1:3] == ["-m", "gigpo_lightning"]]
    (make,) = [command[2:] for command in shown if command[:2] == ["make-games", "alfworld"]]
    sizes = {"--train": "2", "--seen": "1", "--unseen": "1"}
    small = [sizes.get(before, value) for before, value in zip(["", *make], make, strict=False)]
    assert run_make([str(tmp_path) if value == "DIR" else value for value in small]) == 0
    assert "train: 2 games" in capsys.readouterr().out
    (check,) = [command[2:] for command in shown if command[:2] == ["check-env", "alfworld"]]
    assert run_check([str(tmp_path / "empty") if value == "DIR" else value for value in check]) == 2
    assert "holds no game.tw-pddl files" in capsys.readouterr().err


def test_the_commands_of_benchmarks_exist() -> None:
    shown = {word for page in PAGES for word in re.findall(r"benchmarks[/.]\w+(?:\.py)?", page.read_text("utf-8"))}
    scripts = {word for word in shown if word not in ("benchmarks/README",)}
    assert len(scripts) >= 5
    for script in scripts:
        path = script.removesuffix(".py").replace(".", "/") + ".py"
        assert (ROOT / path).is_file(), script
    for command in commands():
        if "benchmarks.learning_curves" in command:
            learning_curves.parse(command[3:])


# -- links and names ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_internal_link_resolves(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        name, _, fragment = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if path.relative_to(ROOT).as_posix() in MADE_BY_BENCHMARKS and "TBD" in PAGES[0].read_text(encoding="utf-8"):
            continue
        assert path.exists(), f"{page.name} links to {target}"
        if fragment:
            assert fragment in anchors(path), f"{page.name} links to {target}"


def test_every_column_of_the_rollout_file_is_described() -> None:
    text = (ROOT / "docs" / "rollouts.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    described = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert set(SCHEMA.names) <= set(described)


def test_every_group_of_figures_and_callback_is_described() -> None:
    text = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    for group in views.LAYOUT:
        assert f"`{group}/" in text
    for name in gigpo_lightning.callbacks.__all__:
        assert f"| `{name}`" in text or name == "newest_complete", name


# -- the example world -------------------------------------------------------------------------------------------------


def write_examples(folder: Path) -> None:
    """Write the files that the docs show."""
    for page in PAGES:
        for name, block in named_blocks(page).items():
            (folder / name).write_text(block, encoding="utf-8")


def test_the_world_of_ones_own_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two iterations and the evaluation from the working folder; then the rollouts are read as the docs say."""
    write_examples(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("GIGPO_RUN_PLACE", "")
    small = ["--trainer.max_epochs=2", "--data.groups=4", "--data.evaluation.tasks=5", "--data.evaluation.seeds=1"]
    assert __main__.main(["fit", "--config", "walk.yaml", *small]) == 0
    out = capsys.readouterr().out
    assert "iteration 2/2" in out and "results:     runs/walk/version_0/results.json" in out
    (reading,) = blocks(ROOT / "docs" / "rollouts.md", "python")
    exec(reading.replace("runs/alfworld/", "runs/walk/"), {})
    assert re.search(r"the prize is (left|right)\n  > go (left|right)    [+-]\d\.\d\d\n", capsys.readouterr().out)
