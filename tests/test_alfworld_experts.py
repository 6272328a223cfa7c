"""The experts: the explorer knows only what it read and still solves everything; the oracle's are the shortest."""

from __future__ import annotations

from collections import deque

import pytest

from gigpo_lightning.envs.alfworld.engine import Simulator
from gigpo_lightning.envs.alfworld.experts import Explorer, explorer_solution, oracle_solution
from gigpo_lightning.envs.alfworld.game import GameData, game_from_problem
from gigpo_lightning.envs.alfworld.goals import (
    CLEAN,
    HEAT,
    LOOK,
    SIMPLE,
    TASK_TYPES,
    TEMPLATES,
    TWO,
    Goal,
    Want,
    read_instruction,
)
from gigpo_lightning.envs.alfworld.search import STUCK, Floor, Search, search_length, shortest
from gigpo_lightning.envs.alfworld.tasks import GeneratedTasks
from gigpo_lightning.envs.base import Observation


def breadth_first(game: GameData, limit: int = 12) -> int:
    """The length of the shortest solution by trying everything: a brute-force oracle for small rooms."""
    simulator = Simulator(game)
    queue = deque([(simulator.snapshot(), 0)])
    seen = set()
    while queue:
        state, depth = queue.popleft()
        simulator.restore(state)
        for command in simulator.admissible():
            if command.split()[0] in ("look", "inventory", "help", "examine", "close", "slice"):
                continue
            simulator.restore(state)
            if simulator.step(command)[1]:
                return depth + 1
            new = simulator.snapshot()
            key = repr(new[:-1])  # all but the last printed text
            if key not in seen and depth + 1 < limit:
                seen.add(key)
                queue.append((new, depth + 1))
    return 0


@pytest.mark.parametrize("task_type", TASK_TYPES)
def test_oracle_is_as_short_as_brute_force(task_type):
    tasks = GeneratedTasks(difficulty={"type": task_type, "receptacles": [2, 3], "objects": [1, 3]})
    for index in range(3):
        task = tasks.get("train", index)
        assert len(oracle_solution(task.payload)) == breadth_first(task.payload) == task.difficulty["oracle_steps"]


@pytest.mark.parametrize("receptacles", [3, 10, 18, 44])
def test_explorer_wins_and_is_as_long_as_predicted(receptacles):
    tasks = GeneratedTasks(difficulty={"receptacles": receptacles})
    for index in range(12):
        task = tasks.get("unseen", index)
        steps = len(explorer_solution(task.payload))
        assert steps == task.difficulty["steps"] >= task.difficulty["oracle_steps"]


def test_mean_lengths_are_those_of_the_real_world():
    # Measured before on rooms of the recorded layout: 9-13 steps at 10 receptacles, 12-20 at 18, 18-41 at 44.
    for receptacles, low, high in ((10, 9, 14), (18, 12, 21), (44, 18, 45)):
        tasks = GeneratedTasks(difficulty={"receptacles": receptacles})
        steps = [tasks.get("train", index).difficulty["steps"] for index in range(60)]
        assert low <= sum(steps) / len(steps) <= high


def test_explorer_speaks_both_dialects():
    task = GeneratedTasks(difficulty={"receptacles": 6, "type": SIMPLE}).get("train", 0)
    game = task.payload
    old = game_from_problem(game.problem_text, game.instruction, dialect="put", task_type=game.task_type)
    assert explorer_solution(game)[-1].startswith("move ")
    assert explorer_solution(old)[-1].startswith("put ")
    assert len(explorer_solution(old)) == len(explorer_solution(game))


def test_explorer_reads_and_does_not_peek():
    # A made-up world that no simulator runs: only the texts can tell the explorer what to do.
    explorer = Explorer()
    room = (
        "You are in the middle of a room. Looking quickly around you, you see a drawer 1, a desk 1, and a sinkbasin 1."
    )
    visits = ["go to desk 1", "go to drawer 1", "go to sinkbasin 1"]
    asked = explorer.act(Observation(room, "clean some cup and put it in drawer."), [*visits, "look"])
    assert asked == "go to drawer 1"
    asked = explorer.act(
        Observation("You arrive at drawer 1. The drawer 1 is closed."), [*visits, "open drawer 1", "look"]
    )
    assert asked == "open drawer 1"
    text = "You open the drawer 1. The drawer 1 is open. In it, you see nothing."
    assert explorer.act(Observation(text), [*visits, "close drawer 1", "look"]) == "go to desk 1"
    text = "You arrive at desk 1. On the desk 1, you see a cup 2, and a pen 1."
    moves = [*visits, "take cup 2 from desk 1", "take pen 1 from desk 1", "look"]
    assert explorer.act(Observation(text), moves) == "take cup 2 from desk 1"
    text = "You pick up the cup 2 from the desk 1."
    assert explorer.act(Observation(text), [*visits, "look"]) == "go to sinkbasin 1"
    text = "You arrive at sinkbasin 1. On the sinkbasin 1, you see nothing."
    assert explorer.act(Observation(text), [*visits, "clean cup 2 with sinkbasin 1"]) == "clean cup 2 with sinkbasin 1"
    text = "You clean the cup 2 using the sinkbasin 1."
    assert explorer.act(Observation(text), [*visits, "look"]) == "go to drawer 1"
    text = "You arrive at drawer 1. The drawer 1 is open. In it, you see nothing."
    assert explorer.act(Observation(text), [*visits, "move cup 2 to drawer 1"]) == "move cup 2 to drawer 1"


def test_explorer_goes_on_after_a_refusal():
    explorer = Explorer()
    room = "You are in the middle of a room. Looking quickly around you, you see a desk 1, and a bed 1."
    commands = ["go to bed 1", "go to desk 1", "look"]
    assert explorer.act(Observation(room, "put a pen in drawer."), commands) == "go to desk 1"
    assert explorer.act(Observation("Nothing happens."), commands) == "go to bed 1"
    # Nothing left to try: it still answers with something possible.
    assert explorer.act(Observation("You arrive at bed 1. On the bed 1, you see nothing."), commands) == "look"


def test_explorer_wants_an_instruction_it_can_read():
    with pytest.raises(ValueError, match="first observation"):
        Explorer().act(Observation("You are in the middle of a room."), ["look"])
    with pytest.raises(ValueError, match="follows none of the known wordings"):
        Explorer().act(Observation("You are in the middle of a room.", "Tidy up, please."), ["look"])


def test_every_wording_is_read_back():
    for kind in TASK_TYPES:
        for wording in range(len(TEMPLATES[kind])):
            target = "DeskLamp" if kind == LOOK else "CounterTop"
            goal = Goal(kind, "SoapBar", target)
            assert read_instruction(goal.instruction(wording)) == Want(kind, "soapbar", target.lower())
            assert read_instruction(f"Your task is to: {goal.instruction(wording)}\n") == goal.want()


def floor(inside: dict[str, list[str]], closed: tuple[str, ...] = ()) -> Floor:
    names = ("cabinet 1", "countertop 1", "microwave 1", "sinkbasin 1")
    return Floor("", {name: (name, name in closed) for name in names}, inside)


def test_lengths_by_hand():
    want = Want(SIMPLE, "cup", "countertop")
    # go cabinet, take, go countertop, move
    assert len(shortest(want, floor({"cup 1": ["cabinet 1"]}))) == 4
    # and one more to open; the search finds the cup in its first place, so it is as short
    room = floor({"cup 1": ["cabinet 1"]}, closed=("cabinet 1", "microwave 1"))
    assert len(shortest(want, room)) == search_length(want, room) == 5
    # the search looks into cabinet (2), countertop (1), microwave (2), sinkbasin (1), then: take, go, move
    room = floor({"cup 1": ["sinkbasin 1"]}, closed=("cabinet 1", "microwave 1"))
    assert len(shortest(want, room)) == 4
    assert search_length(want, room) == 9
    # clean a cup that lies in the sink: go, take, clean, go, move
    assert len(shortest(Want(CLEAN, "cup", "countertop"), floor({"cup 1": ["sinkbasin 1"]}))) == 5
    # heat: go, take, go, heat (the door may stay closed), go, move
    room = floor({"cup 1": ["countertop 1"]}, closed=("microwave 1",))
    assert len(shortest(Want(HEAT, "cup", "countertop"), room)) == 6
    # two cups from one place: 4 + 4; one of them there already: 4
    assert len(shortest(Want(TWO, "cup", "countertop"), floor({"cup 1": ["cabinet 1"], "cup 2": ["cabinet 1"]}))) == 8
    assert (
        len(shortest(Want(TWO, "cup", "countertop"), floor({"cup 1": ["cabinet 1"], "cup 2": ["countertop 1"]}))) == 4
    )
    # lamp and cup on one place: go, take, use
    room = floor({"cup 1": ["countertop 1"], "desklamp 1": ["countertop 1"]})
    assert len(shortest(Want(LOOK, "cup", "desklamp"), room)) == 3


def test_no_solution_is_empty():
    want = Want(SIMPLE, "cup", "desk")
    room = floor({"cup 1": ["cabinet 1"]})
    assert shortest(want, room) == []
    assert search_length(want, room) == 201  # one more than the default limit
    assert Search(want, []).next() == STUCK
