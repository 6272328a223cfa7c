"""Games as files: written in the recorded layout, read back the same; skipped, corrupted and missing data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gigpo_lightning.envs.alfworld.check import run_check
from gigpo_lightning.envs.alfworld.engine import Simulator
from gigpo_lightning.envs.alfworld.files import run_make, write_games
from gigpo_lightning.envs.alfworld.game import load_game
from gigpo_lightning.envs.alfworld.goals import TASK_TYPES
from gigpo_lightning.envs.alfworld.tasks import GeneratedTasks, RecordedTasks


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    tasks = GeneratedTasks(difficulty={"receptacles": [2, 12]})
    for split in tasks.splits:
        write_games(tasks, split, 6, folder)
    return folder


def test_written_games_are_read_back_the_same(written):
    generated, recorded = GeneratedTasks(difficulty={"receptacles": [2, 12]}), RecordedTasks(str(written))
    for split in recorded.splits:
        assert recorded.len(split) == 6
        expected = {task.id: task for task in (generated.get(split, index) for index in range(6))}
        ids = [recorded.get(split, index).id for index in range(6)]
        assert ids == sorted(expected)
        for index in range(6):
            task = recorded.get(split, index)
            assert task.difficulty == expected[task.id].difficulty
            assert task.payload.problem_text == expected[task.id].payload.problem_text
            assert task.payload.instruction == expected[task.id].payload.instruction


def test_written_layout_is_the_recorded_one(written):
    (game, *_) = sorted((written / "json_2.1.1" / "valid_unseen").glob("*/trial_*/game.tw-pddl"))
    kind, thing, movable, target, scene = game.parent.parent.name.split("-")
    assert kind in TASK_TYPES
    assert movable == "None"
    traj = json.loads((game.parent / "traj_data.json").read_text())
    assert traj["task_type"] == kind
    assert traj["pddl_params"]["object_target"] == thing
    assert target in (traj["pddl_params"]["parent_target"], traj["pddl_params"]["toggle_target"])
    assert 1 <= int(scene) <= 430
    content = json.loads(game.read_text())
    assert {"pddl_domain", "grammar", "pddl_problem", "walkthrough", "solvable"} == set(content)
    assert content["pddl_problem"] == (game.parent / "initial_state.pddl").read_text()
    simulator = Simulator(load_game(game))
    assert [simulator.step(command)[1] for command in content["walkthrough"]][-1]


def test_recorded_games_are_narrowed_by_difficulty(written):
    tasks = RecordedTasks(str(written))
    every = [tasks.get("train", index).difficulty for index in range(6)]
    few = min(one["receptacles"] for one in every)
    narrowed = tasks.narrow({"receptacles": [2, few]})
    assert narrowed.len("train") == sum(one["receptacles"] == few for one in every)
    assert narrowed.get("train", 0).difficulty["receptacles"] == few
    with pytest.raises(ValueError, match="no task fits these difficulty knobs together: receptacles"):
        tasks.narrow({"receptacles": 44}).len("train")
    with pytest.raises(ValueError, match="did you mean"):
        tasks.narrow({"stepz": 3})


def copy_game(written: Path, target: Path, name: str, **changes) -> Path:
    (source, *_) = sorted((written / "json_2.1.1" / "train").glob("*/trial_*"))
    place = target / "json_2.1.1" / "train" / name
    place.mkdir(parents=True)
    for file in source.iterdir():
        (place / file.name).write_text(file.read_text())
    if changes:
        content = {**json.loads((place / "game.tw-pddl").read_text()), **changes}
        (place / "game.tw-pddl").write_text(json.dumps(content))
    return place


def test_skipped_games(written, tmp_path):
    copy_game(written, tmp_path, "pick_and_place_simple-Cup-None-Shelf-10/trial_a")
    copy_game(written, tmp_path, "pick_and_place_simple-CupSliced-None-Shelf-10/trial_b")
    copy_game(written, tmp_path, "pick_and_place_with_movable_recep-Cup-Pan-Shelf-10/trial_c")
    copy_game(written, tmp_path, "pick_and_place_simple-Cup-None-Shelf-10/trial_d", solvable=False)
    tasks = RecordedTasks(str(tmp_path))
    assert [tasks.get("train", i).id for i in range(tasks.len("train"))] == [
        "pick_and_place_simple-Cup-None-Shelf-10/trial_a"
    ]
    with pytest.raises(ValueError, match="split 'seen' has no games"):
        tasks.len("seen")


def test_corrupted_files_are_named(written, tmp_path):
    place = copy_game(written, tmp_path, "pick_and_place_simple-Cup-None-Shelf-10/trial_a")
    whole = (place / "game.tw-pddl").read_text()
    (place / "game.tw-pddl").write_text(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"trial_a/game\.tw-pddl is no JSON"):
        RecordedTasks(str(tmp_path)).len("train")
    (place / "game.tw-pddl").write_text(whole)
    (place / "traj_data.json").write_text('{"task_')
    with pytest.raises(ValueError, match=r"trial_a/traj_data\.json is no JSON"):
        RecordedTasks(str(tmp_path)).len("train")


NESTED = 100_000 * "["


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"task": 1}]', r"traj_data\.json holds a JSON list instead of an object"),
        (b"5", r"traj_data\.json holds a JSON int instead of an object"),
        ("é".encode("latin-1"), r"traj_data\.json is no UTF-8 text"),
        (b'{"a": ' + NESTED.encode(), r"traj_data\.json is no JSON \(maximum recursion depth"),
    ],
)
def test_odd_traj_data_are_named(written, tmp_path, content, message):
    place = copy_game(written, tmp_path, "pick_and_place_simple-Cup-None-Shelf-10/trial_a")
    (place / "traj_data.json").write_bytes(content)
    with pytest.raises(ValueError, match="trial_a/" + message):
        RecordedTasks(str(tmp_path)).len("train")
    with pytest.raises(ValueError, match="trial_a/" + message):
        load_game(place / "game.tw-pddl")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"walkthrough": 5}, "'walkthrough' must be a list of commands, but it is 5"),
        ({"walkthrough": "look"}, "'walkthrough' must be a list of commands, but it is 'look'"),
        ({"walkthrough": [["look"]]}, "'walkthrough' must be a list of commands"),
        ({"pddl_problem": "(define (problem x) (:domain x) (:objects) (:init) (:goal " + 5000 * "(and "}, "bracket"),
        (
            {"pddl_problem": f"(define (problem x) (:domain x) (:objects) (:init) (:goal {5000 * '(and '}{5002 * ')'}"},
            "maximum recursion depth",
        ),
    ],
)
def test_odd_game_files_are_named(written, tmp_path, changes, message):
    place = copy_game(written, tmp_path, "pick_and_place_simple-Cup-None-Shelf-10/trial_a", **changes)
    with pytest.raises(ValueError, match=rf"trial_a/game\.tw-pddl: .*{message}"):
        load_game(place / "game.tw-pddl")


def test_a_nested_game_file_is_named(tmp_path):
    (tmp_path / "game.tw-pddl").write_text(NESTED)
    with pytest.raises(ValueError, match=r"game\.tw-pddl is no JSON \(maximum recursion depth"):
        load_game(tmp_path / "game.tw-pddl")


def test_missing_data_says_how_to_get_it(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"(?s)data_dir is .*pip install alfworld.*alfworld-download"):
        RecordedTasks(str(tmp_path))
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"\$ALFWORLD_DATA is .*nowhere"):
        RecordedTasks()


def test_data_folder_from_the_environment(written, monkeypatch):
    monkeypatch.setenv("ALFWORLD_DATA", str(written))
    assert RecordedTasks().len("unseen") == 6
    assert RecordedTasks(str(written / "json_2.1.1")).len("unseen") == 6


def test_make_games_command(tmp_path, capsys):
    argv = [str(tmp_path / "out"), "--train", "2", "--seen", "0", "--unseen", "1", "--difficulty", '{"receptacles": 3}']
    assert run_make(argv) == 0
    assert RecordedTasks(str(tmp_path / "out")).len("train") == 2
    assert run_make([str(tmp_path / "out"), "--difficulty", '{"rooms": "kitchen"}']) == 2
    assert "did you mean 'room'" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert run_make([str(tmp_path / "file"), "--train", "1"]) == 2
    assert "cannot be written" in capsys.readouterr().err
    with pytest.raises(ValueError, match="count must be from 1 to 5"):
        write_games(GeneratedTasks(train_tasks=5), "train", 6, tmp_path)


@pytest.mark.parametrize(
    ("option", "message"),
    [("--unseen=-1", "--unseen=-1: must be from 0 to 1000"), ("--seen=1001", "--seen=1001: must be from 0 to 1000")],
)
def test_make_games_checks_all_counts_before_it_writes(tmp_path, capsys, option, message):
    assert run_make([str(tmp_path / "out"), "--train=1", option, "--difficulty", '{"receptacles": 3}']) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--games=-1", "--games=0", "--steps=0"])
def test_check_env_needs_something_to_compare(tmp_path, capsys, option):
    assert run_check(["--data", str(tmp_path), option]) == 2
    assert f"error: {option}: must be at least 1" in capsys.readouterr().err
