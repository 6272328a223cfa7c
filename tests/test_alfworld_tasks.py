"""Generated ALFWorld tasks: solvable, inside their bands, disjoint by layout, the same everywhere."""

from __future__ import annotations

import math
import os
import pickle
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from gigpo_lightning.envs.alfworld.engine import Simulator
from gigpo_lightning.envs.alfworld.experts import explorer_solution, measure, oracle_solution
from gigpo_lightning.envs.alfworld.goals import TASK_TYPES
from gigpo_lightning.envs.alfworld.rooms import FURNITURE, OBJECTS, ROOMS, can_contain
from gigpo_lightning.envs.alfworld.tasks import GeneratedTasks
from gigpo_lightning.envs.alfworld.vocabulary import vocabulary

REPOSITORY = Path(__file__).resolve().parents[1]
# sha256 over identifiers, difficulty, instruction and problem text of 24 games; taken once, the same on CPython 3.10
# to 3.13.
STORED_DIGEST = "79d9a7c10d5b2956c6400ee7793a9cbaa6c37245e2f8d56b610083ab3d8594d0"
DIGEST_PROGRAM = """
import hashlib
from gigpo_lightning.envs.alfworld.tasks import GeneratedTasks
total = hashlib.sha256()
for difficulty in ({}, {"receptacles": [2, 3], "steps": [3, 5]}):
    tasks = GeneratedTasks(seed=7, difficulty=difficulty)
    for split in tasks.splits:
        for index in range(4):
            task = tasks.get(split, index)
            parts = (task.id, sorted(task.difficulty.items()), task.payload.instruction, task.payload.problem_text)
            total.update(repr(parts).encode())
print(total.hexdigest())
"""


def layout_of(task) -> tuple:
    """Room kind and number of receptacles by type, read back from the problem."""
    kinds = Counter(fact[2] for fact in task.payload.problem.facts if fact[0] == "receptacletype")
    return task.difficulty["room"], tuple(sorted(kinds.items()))


@pytest.mark.parametrize("receptacles", [2, 3, 6, 10, 18, 44])
@pytest.mark.parametrize("task_type", TASK_TYPES)
def test_every_type_and_size_is_solvable_and_not_solved(task_type, receptacles):
    tasks = GeneratedTasks(difficulty={"type": task_type, "receptacles": receptacles})
    for split in tasks.splits:
        task = tasks.get(split, 3)
        assert not Simulator(task.payload).won
        assert oracle_solution(task.payload)
        # The difficulty that the generator wrote down without playing equals the one measured by playing.
        measured = measure(task.payload)
        assert {name: task.difficulty[name] for name in measured} == measured
        assert (task.difficulty["type"], task.payload.task_type) == (task_type, task_type)
        assert measured["receptacles"] == receptacles


def test_the_rooms_obey_their_own_rules():
    tasks = GeneratedTasks(difficulty={"receptacles": [2, 30]})
    seen = Counter()
    for index in range(60):
        problem = tasks.get("train", index).payload.problem
        facts = set(problem.facts)
        kinds = {fact[1]: fact[2] for fact in facts if fact[0] in ("objecttype", "receptacletype")}
        portable = {fact[1] for fact in facts if fact[0] == "pickupable"}
        places = Counter(fact[1] for fact in facts if fact[0] == "inreceptacle")
        for _, thing, holder in (fact for fact in facts if fact[0] == "inreceptacle"):
            if thing in portable:
                assert ("cancontain", kinds[holder], kinds[thing]) in facts
        seen["fixture"] += any(one.startswith(("window_", "mirror_")) for one in places)
        seen["double"] += any(count > 1 for count in places.values())
        seen["open"] += any(fact[0] == "opened" for fact in facts)
        seen["shared"] += len({f[2] for f in facts if f[0] == "receptacleatlocation"}) < sum(
            f[0] == "receptacleatlocation" for f in facts
        )
        floor = {fact[1] for fact in facts if fact[0] == "objecttype"} - set(places)
        assert not floor & portable
    # All the oddities of real rooms turn up in 60 games, none of them in all.
    assert all(0 < seen[oddity] < 60 for oddity in ("fixture", "double", "open", "shared")), seen


def test_what_fits_where():
    # Facts of the recorded games: cups go into the microwave, forks do not; a towel only onto its holder.
    assert can_contain("Microwave", "Cup")
    assert not can_contain("Microwave", "Fork")
    assert OBJECTS["Towel"].holders == {"TowelHolder"}
    assert not can_contain("CounterTop", "Mirror")
    # Every kind of room has space for the largest house, 44 receptacles.
    assert all(sum(FURNITURE[room].values()) >= 44 for room in ROOMS)


def test_splits_are_disjoint_by_layout():
    tasks = GeneratedTasks(train_tasks=500, difficulty={"receptacles": [2, 4]})
    layouts = {split: {layout_of(tasks.get(split, i)) for i in range(250)} for split in tasks.splits}
    assert not layouts["unseen"] & (layouts["train"] | layouts["seen"])
    assert layouts["seen"] <= {layout_of(tasks.get("train", index)) for index in range(500)}
    # Small rooms are varied: a few layouts would be learnt by heart.
    assert len(layouts["train"]) > 100
    assert len(layouts["unseen"]) > 30


def test_seen_tasks_are_no_training_tasks():
    tasks = GeneratedTasks(train_tasks=3, difficulty={"receptacles": 3})
    trained = {tasks.get("train", index).payload.problem_text for index in range(3)}
    assert all(tasks.get("seen", index).payload.problem_text not in trained for index in range(9))


def test_same_index_same_task_and_other_seed_other_task():
    first, second, other = (GeneratedTasks(seed=seed).get("train", 11) for seed in (5, 5, 6))
    assert first == second
    assert first.payload.problem_text != other.payload.problem_text
    assert pickle.loads(pickle.dumps(first)) == first
    assert len({GeneratedTasks().get("train", index).id for index in range(50)}) == 50


def test_the_same_games_on_every_machine():
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONHASHSEED": "123"}
    run = subprocess.run(
        [sys.executable, "-c", DIGEST_PROGRAM], capture_output=True, text=True, env=environment, check=True
    )
    assert run.stdout.strip() == STORED_DIGEST


@pytest.mark.parametrize(
    "difficulty",
    [
        {"receptacles": [2, 3], "type": ["pick_and_place_simple", "look_at_obj_in_light"], "steps": [3, 5]},
        {"receptacles": 18, "steps": [25, 30]},
        {"receptacles": [30, 44], "steps": [40, 60], "target_hidden": 1},
        {"receptacles": 18, "hidden": [0, 0.1]},
        {"receptacles": [6, 10], "oracle_steps": [3, 4], "objects": [5, 7], "room": ["livingroom", "bedroom"]},
    ],
)
def test_bands_are_kept(difficulty):
    tasks = GeneratedTasks().narrow(difficulty)
    for index in range(20):
        found = tasks.get("train", index).difficulty
        for name, wanted in difficulty.items():
            if name in ("type", "room"):
                assert found[name] in wanted
            else:
                low, high = wanted if isinstance(wanted, list) else (wanted, wanted)
                assert low <= found[name] <= high


def test_task_types_are_drawn_evenly():
    tasks = GeneratedTasks(difficulty={"receptacles": [3, 8]})
    counts = Counter(tasks.get("train", index).difficulty["type"] for index in range(300))
    # 50 of each expected; binomial standard deviation 6.5.
    assert all(25 <= counts[kind] <= 80 for kind in TASK_TYPES), counts


def test_narrowing_twice_is_narrowing_by_both():
    both = GeneratedTasks().narrow({"receptacles": [3, 9], "type": ["pick_and_place_simple"]})
    twice = (
        GeneratedTasks()
        .narrow({"receptacles": [2, 9]})
        .narrow({"type": "pick_and_place_simple", "receptacles": [3, 20]})
    )
    assert both.get("unseen", 4) == twice.get("unseen", 4)


@pytest.mark.parametrize(
    ("difficulty", "message"),
    [
        ({"reciptacles": 3}, "did you mean 'receptacles'"),
        ({"type": "pick_two"}, "did you mean 'pick_two_obj_and_place'"),
        ({"type": []}, "difficulty type must be"),
        ({"receptacles": 1}, "between 2 and 44"),
        ({"receptacles": [9, 3]}, "low <= high"),
        ({"steps": "short"}, "must be a whole number"),
        (
            {"receptacles": [2, math.inf]},
            r"difficulty receptacles must be a whole number or \[low, high\] .*got \[2, inf\]",
        ),
        ({"receptacles": math.nan}, "difficulty receptacles must be a whole number .*got nan"),
        ({"receptacles": 2.5}, "difficulty receptacles must be a whole number .*got 2.5"),
        ({"hidden": [0, math.nan]}, r"difficulty hidden must be a number .*got \[0, nan\]"),
        ({"hidden": [0, 10**400]}, "difficulty hidden must lie between 0.0 and 1.0"),
        ({5: 3}, "difficulty has no knob 5; known knobs: "),
        ({None: 3}, "difficulty has no knob None; known knobs: "),
        (["receptacles"], r"difficulty must be a mapping of knobs to values; got \['receptacles'\]"),
        ({"type": "pick_two_obj_and_place", "steps": [3, 5]}, r"together: type: .*steps: \[3, 5\]"),
        ({"receptacles": [2, 3], "steps": [30, 40]}, "together: receptacles: .*steps"),
        ({"type": "pick_heat_then_place_in_recep", "room": "bedroom"}, "together: type: .*room"),
        ({"type": "pick_two_obj_and_place", "objects": 1}, "objects: "),
    ],
)
def test_bad_knobs_are_named(difficulty, message):
    with pytest.raises(ValueError, match=message):
        GeneratedTasks().narrow(difficulty)


def test_bad_arguments():
    with pytest.raises(ValueError, match="seen_tasks must be at least 1"):
        GeneratedTasks(seen_tasks=0)
    with pytest.raises(ValueError, match=f"train_tasks must be at least 1 and at most 1,000,000,000; got {10**24}"):
        GeneratedTasks(train_tasks=10**24)
    assert GeneratedTasks(train_tasks=10**9, difficulty={"receptacles": 2}).get("seen", 0)  # drawn from 10⁹ layouts
    with pytest.raises(ValueError, match="split must be one of train, seen, unseen"):
        GeneratedTasks().len("valid")
    with pytest.raises(IndexError, match="from 0 to 9"):
        GeneratedTasks(train_tasks=10).get("train", 10)
    with pytest.raises(ValueError, match="already"):
        GeneratedTasks(difficulty={"receptacles": [2, 3]}).narrow({"receptacles": 18})


def test_vocabulary_covers_all_texts():
    entries = sorted(vocabulary(), key=len, reverse=True)
    ends = [(r"(?<!\w)" * e[0].isalnum() + re.escape(e) + r"(?!\w)" * e[-1].isalnum()) for e in entries]
    pattern = re.compile("|".join(ends) + r"|(?P<unknown>[^\s,.])")
    tasks = GeneratedTasks()
    for index in range(25):
        task = tasks.get("train", index)
        simulator = Simulator(task.payload)
        texts = [simulator.last_text, task.payload.instruction]
        for command in [*explorer_solution(task.payload), "look", "inventory", "help", "nonsense"]:
            texts += [*simulator.admissible(), simulator.step(command)[0]]
        for text in texts:
            unknown = [match[0] for match in pattern.finditer(text) if match["unknown"]]
            assert not unknown, (text, unknown)
    # A listed thing costs three tokens: ", a", its type, its number.
    text = "On the desk 1, you see a book 2, a pen 1, and a mug 3."
    tokens = [match[0] for match in re.finditer("|".join(ends) + r"|\S", text)]
    assert tokens == ["On the", "desk", "1", ", you see a", "book", "2", ", a", "pen", "1", ", and a", "mug", "3", "."]
