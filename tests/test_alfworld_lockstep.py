"""The native ALFWorld engine against the stock one: text, commands and won, equal at every step.

Needs the extra textworld. `pytest -m slow` runs the long comparison (20,000 steps, about half an hour);
`ALFWORLD_LOCKSTEP_STEPS` sets its number of steps.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gigpo_lightning.envs.alfworld import text as say
from gigpo_lightning.envs.alfworld.check import CheckReport, check_env, compare, run_check
from gigpo_lightning.envs.alfworld.env import AlfworldEnv
from gigpo_lightning.envs.alfworld.experts import oracle_solution
from gigpo_lightning.envs.alfworld.game import DOMAIN_MARKER, GameData, game_from_problem, load_game, marker_grammar
from gigpo_lightning.envs.alfworld.oracle import StockEngine, is_available, stock_game_file
from gigpo_lightning.envs.alfworld.tasks import GeneratedTasks
from gigpo_lightning.envs.base import Task
from tests.alfworld_problems import GOALS, random_game

pytestmark = pytest.mark.skipif(
    not is_available(), reason="the stock engine is not installed: pip install -c constraints.txt '.[textworld]'"
)
SIZES = (3, 5, 8, 12, 18, 30)
SLOW_STEPS = int(os.environ.get("ALFWORLD_LOCKSTEP_STEPS", "20000"))


def generated_games(sizes: tuple[int, ...], seed: int) -> Iterator[GameData]:
    """One household per task type and size; every third game in the wording of older data."""
    for number, (kind, size) in enumerate((kind, size) for kind in GOALS for size in sizes):
        tasks = GeneratedTasks(seed=seed, difficulty={"type": kind, "receptacles": size})
        game = tasks.get("train", number).payload
        yield replace(game, dialect="put", arrives_at_location=True, has_help=False) if number % 3 == 2 else game


def assert_equal(report: CheckReport) -> None:
    assert not report.differences, report.summary()


@pytest.mark.parametrize("dialect", ["move", "put"])
def test_odd_rooms(dialect: str) -> None:
    """Shared places, objects in two receptacles, initial properties, things in things; random and broken commands."""
    report, rng = CheckReport(), random.Random(dialect)
    for number, kind in enumerate(GOALS):
        game = random_game(number, 5 + number // 2, kind, dialect)
        compare(game, StockEngine(game), 16, rng, report)
    assert_equal(report)
    assert report.steps == 16 * len(GOALS)


def test_generated_households() -> None:
    """A household of each task type, with solutions, random and broken commands."""
    report, rng = CheckReport(), random.Random(0)
    for game in generated_games((6,), seed=0):
        compare(game, StockEngine(game), 25, rng, report, oracle_solution)
    assert_equal(report)
    assert report.wins >= 1


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_long_comparison() -> None:
    """Six task types, six sizes, at least 20,000 steps; odd rooms among them."""
    report, rng = CheckReport(), random.Random(1)
    steps = -(-SLOW_STEPS // 48)
    for game in generated_games(SIZES, seed=1):
        compare(game, StockEngine(game), steps, rng, report, oracle_solution)
    for number, kind in enumerate(GOALS):
        for dialect in ("move", "put"):
            game = random_game(100 + number, 5 + number, kind, dialect)
            compare(game, StockEngine(game), steps, rng, report)
    print(report.summary())
    assert_equal(report)
    assert report.steps >= SLOW_STEPS
    assert report.wins >= 50


def test_comparison_sees_each_kind_of_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison that finds nothing must be able to find something."""
    game = random_game(1, 5, "look_at_obj_in_light")
    stock = StockEngine(game)
    report = CheckReport()
    with monkeypatch.context() as patch:
        patch.setattr(say, "NOTHING_HAPPENS", "Nothing happened.")
        compare(game, stock, 40, random.Random(1), report)
    assert {one.what for one in report.differences} == {"text"}
    without_help, report = replace(game, has_help=False), CheckReport()
    compare(without_help, stock, 3, random.Random(0), report)
    assert "commands" in {one.what for one in report.differences}
    # Here the goal holds from the start.
    easy = game.problem_text.replace("(:goal (and", "(:goal (or (not (holdsAny agent1))")
    report = CheckReport()
    compare(game_from_problem(easy, game.instruction), stock, 3, random.Random(0), report)
    assert "won" in {one.what for one in report.differences}


def write(folder: Path, data: dict[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "game.tw-pddl"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize("dialect", ["move", "put"])
def test_files_with_the_real_domain_and_grammar_are_recognised(tmp_path: Path, dialect: str) -> None:
    game = random_game(2, 6, "pick_heat_then_place_in_recep", dialect)
    assert load_game(write(tmp_path, stock_game_file(game))) == replace(game, task_type="")


def test_help_written_inline_as_in_the_data_of_version_212(tmp_path: Path) -> None:
    game = random_game(2, 6, "pick_heat_then_place_in_recep")
    data = stock_game_file(game)
    body, _ = data["grammar"].split("action help {")
    answer = "\n" + say.help_text()
    data["grammar"] = f'{body}\naction help {{\n    template :: "help";\n    feedback :: "{answer}";\n}}\n'
    path = write(tmp_path, data)
    assert load_game(path).has_help
    stock = StockEngine(path)
    stock.reset()
    assert stock.step("help")[0] == say.help_text()


@pytest.mark.parametrize(
    ("key", "old", "new", "name"),
    [
        ("pddl_domain", "(not (isCool ?o))", "", "heatobject"),
        ("pddl_domain", "(sliceable ?co)", "(sliceable ?co) (pickupable ?co)", "sliceobject"),
        ("grammar", "You close the", "You shut the", "CloseObject.feedback"),
        ("grammar", "open {r}", "unlock {r}", "command openobject"),
        ("grammar", ", and ", " and ", "list_last_separator"),
    ],
)
def test_other_rules_or_sentences_are_refused_by_name(tmp_path: Path, key: str, old: str, new: str, name: str) -> None:
    data = stock_game_file(random_game(2, 6, "pick_heat_then_place_in_recep"))
    assert old in data[key]
    data[key] = data[key].replace(old, new)
    with pytest.raises(ValueError, match=f"'{name}'.*engine: textworld"):
        load_game(write(tmp_path, data))


def test_costs_and_comments_do_not_matter(tmp_path: Path) -> None:
    game = random_game(2, 6, "pick_heat_then_place_in_recep")
    data = stock_game_file(game)
    data["pddl_domain"] = "; another head\n" + data["pddl_domain"].replace("(increase (total-cost) 5)", "")
    assert load_game(write(tmp_path, data)) == replace(game, task_type="")


def test_check_env_on_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = list(sys.argv)
    games = [random_game(seed, 5, "pick_cool_then_place_in_recep") for seed in range(2)]
    write(tmp_path / "real", stock_game_file(games[0]))
    marked = {"pddl_domain": DOMAIN_MARKER, "grammar": marker_grammar("chill an apple.")}
    write(tmp_path / "marked", {**stock_game_file(games[1]), **marked})
    write(tmp_path / "refused", {**stock_game_file(games[1]), "grammar": "nonsense"})
    report = check_env(tmp_path, games=3, steps_per_game=15, seed=0)
    assert (report.games, report.steps, len(report.refused)) == (2, 30, 1)
    assert_equal(report)
    assert run_check(["--data", str(tmp_path), "--games", "3", "--steps", "5"]) == 0
    assert "2 games, 10 steps" in capsys.readouterr().out
    assert run_check(["--data", str(tmp_path / "nowhere")]) == 2
    assert sys.argv == arguments  # the planner's translator writes into it


def test_fallback_engine_behaves_like_the_native_one() -> None:
    task = Task("t", "train", {}, random_game(4, 6, "pick_and_place_simple"))
    native, stock = AlfworldEnv(anchor="view"), AlfworldEnv(anchor="view", engine="textworld")
    assert native.reset(task) == stock.reset(task)
    rng = random.Random(4)
    keys: dict[object, object] = {}
    for _ in range(25):
        assert native.admissible_actions() == stock.admissible_actions()
        action = rng.choice([*native.admissible_actions(), "sing"])
        assert native.step(action) == stock.step(action)
        assert keys.setdefault(native.anchor(), stock.anchor()) == stock.anchor()
    assert len(set(keys.values())) == len(keys) > 5
    with pytest.raises(NotImplementedError, match="engine: native"):
        stock.snapshot()


def test_unsolvable_game_is_refused_with_a_reason() -> None:
    game = random_game(1, 6, "pick_and_place_simple")
    unsolvable = replace(
        game, problem_text=game.problem_text.replace("(objectType ?o AppleType)", "(objectType ?o FridgeType)")
    )
    with pytest.raises(ValueError, match="no solution"):
        StockEngine(unsolvable)
