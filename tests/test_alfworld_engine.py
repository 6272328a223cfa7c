"""The native ALFWorld engine without the stock one: parsing, text, rules, goals, anchors, environment, bad input."""

from __future__ import annotations

import itertools
import json
import pickle
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gigpo_lightning.envs.alfworld import env as env_module
from gigpo_lightning.envs.alfworld.condition import Grounder, compile_formula
from gigpo_lightning.envs.alfworld.engine import Simulator
from gigpo_lightning.envs.alfworld.env import AlfworldEnv
from gigpo_lightning.envs.alfworld.game import (
    DOMAIN_MARKER,
    GameData,
    game_from_problem,
    load_game,
    marker_grammar,
)
from gigpo_lightning.envs.alfworld.pddl import Expression, Fact, parse_problem
from gigpo_lightning.envs.base import Task
from tests.alfworld_problems import GOALS, random_game, random_problem

# Two apples, a mug in two receptacles at one place, a knife, a lamp; the agent starts in the middle of the room.
KITCHEN = """
(define (problem kitchen) (:domain alfred)
(:objects agent1 - agent loc_bar_0 loc_bar_1 loc_bar_2 loc_bar_3 - location
  Apple_bar_1 Apple_bar_2 Mug_bar_1 Knife_bar_1 DeskLamp_bar_1 Mirror_bar_1 - object
  Sink_bar_1_bar_SinkBasin Fridge_bar_1 CounterTop_bar_1 CoffeeMachine_bar_1 - receptacle
  AppleType MugType KnifeType DeskLampType MirrorType - otype
  SinkBasinType FridgeType CounterTopType CoffeeMachineType - rtype)
(:init (atLocation agent1 loc_bar_0)
  (receptacleType Sink_bar_1_bar_SinkBasin SinkBasinType) (receptacleAtLocation Sink_bar_1_bar_SinkBasin loc_bar_1)
  (receptacleType Fridge_bar_1 FridgeType) (receptacleAtLocation Fridge_bar_1 loc_bar_2) (openable Fridge_bar_1)
  (receptacleType CounterTop_bar_1 CounterTopType) (receptacleAtLocation CounterTop_bar_1 loc_bar_3)
  (receptacleType CoffeeMachine_bar_1 CoffeeMachineType) (receptacleAtLocation CoffeeMachine_bar_1 loc_bar_3)
  (objectType Apple_bar_1 AppleType) (objectType Apple_bar_2 AppleType) (objectType Mug_bar_1 MugType)
  (objectType Knife_bar_1 KnifeType) (objectType DeskLamp_bar_1 DeskLampType) (objectType Mirror_bar_1 MirrorType)
  (pickupable Apple_bar_1) (pickupable Apple_bar_2) (pickupable Mug_bar_1) (pickupable Knife_bar_1)
  (cleanable Apple_bar_1) (coolable Apple_bar_1) (coolable Apple_bar_2) (sliceable Apple_bar_1)
  (isReceptacleObject Mug_bar_1) (toggleable DeskLamp_bar_1)
  (inReceptacle Apple_bar_1 CounterTop_bar_1) (objectAtLocation Apple_bar_1 loc_bar_3)
  (inReceptacle Apple_bar_2 Fridge_bar_1) (objectAtLocation Apple_bar_2 loc_bar_2)
  (inReceptacle Mug_bar_1 CounterTop_bar_1) (inReceptacle Mug_bar_1 CoffeeMachine_bar_1)
  (objectAtLocation Mug_bar_1 loc_bar_3)
  (inReceptacle Knife_bar_1 CounterTop_bar_1) (objectAtLocation Knife_bar_1 loc_bar_3)
  (inReceptacle DeskLamp_bar_1 CounterTop_bar_1) (objectAtLocation DeskLamp_bar_1 loc_bar_3)
  (inReceptacle Mirror_bar_1 Sink_bar_1_bar_SinkBasin) (objectAtLocation Mirror_bar_1 loc_bar_1)
  (canContain FridgeType AppleType) (canContain CounterTopType AppleType) (canContain CounterTopType KnifeType)
  (canContain SinkBasinType MugType) (= (distance loc_bar_0 loc_bar_1) 7))
(:goal (and (exists (?r - receptacle) (exists (?o - object) (and (coolable ?o) (objectType ?o AppleType)
  (receptacleType ?r CounterTopType) (isCool ?o) (inReceptacle ?o ?r)))))))
"""
TASK = "put a cool apple in countertop."
ROOM = (
    "You are in the middle of a room. Looking quickly around you, you see a coffeemachine 1, a countertop 1, "
    "a fridge 1, and a sinkbasin 1."
)


@pytest.fixture
def kitchen() -> Simulator:
    return Simulator(game_from_problem(KITCHEN, TASK))


def play(sim: Simulator, script: list[tuple[str, str]]) -> None:
    for command, expected in script:
        assert sim.step(command)[0] == expected, command


# --- Parsing ----------------------------------------------------------------------------------------------------------


def test_problem_is_parsed_lower_cased_and_without_numbers() -> None:
    problem = parse_problem(KITCHEN)
    assert problem.domain == "alfred"
    assert problem.objects["apple_bar_1"] == "object"
    assert problem.objects["coffeemachine_bar_1"] == "receptacle"
    assert ("inreceptacle", "mug_bar_1", "coffeemachine_bar_1") in problem.facts
    assert not any(fact[0] in ("=", "distance") for fact in problem.facts)
    assert problem.goal[0] == "and"
    assert problem.goal[1][:2] == ("exists", (("?r", "receptacle"),))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("(isCool ?o)", "(isCool ?x)", r"unbound.*\?x"),
        ("(:goal", "(:aim", r"no '\(:goal"),
        ("(pickupable Mug_bar_1)", "(pickupable Cup_bar_1)", "cup_bar_1.*does not list"),
        ("(pickupable Mug_bar_1)", "pickupable Mug_bar_1", "must hold facts, found pickupable"),
        ("(exists (?r - receptacle)", "(exists ?r", "malformed quantifier"),
        ("loc_bar_3 - location", "loc_bar_3 -", "'-' without a type|does not list|names and types"),
        ("(toggleable DeskLamp_bar_1)", "(toggleable DeskLamp_bar_1))", "outside of brackets|without a|one '.define"),
    ],
)
def test_corrupted_problem_says_what_is_wrong(old: str, new: str, message: str) -> None:
    assert old in KITCHEN
    with pytest.raises(ValueError, match=message):
        game_from_problem(KITCHEN.replace(old, new), TASK)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_truncated_problem_is_a_value_error(share: float) -> None:
    with pytest.raises(ValueError, match="left open"):
        parse_problem(KITCHEN[: int(len(KITCHEN) * share)])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(atLocation agent1 loc_bar_0)", "(atLocation agent1 loc_bar_0) (atLocation agent1 loc_bar_1)"),
        ("(openable Fridge_bar_1)", "(openable Mug_bar_1)"),
        ("(openable Fridge_bar_1)", "(receptacleAtLocation Fridge_bar_1 loc_bar_1)"),
        ("(isCool ?o) (inReceptacle", "(checked ?r) (inReceptacle"),
    ],
)
def test_problem_of_another_shape_points_to_the_other_engine(old: str, new: str) -> None:
    with pytest.raises(ValueError, match="engine: textworld"):
        game_from_problem(KITCHEN.replace(old, new), TASK)


# --- Text and rules, as the stock engine prints them (test_alfworld_lockstep.py compares) -----------------------------


def test_intro_and_first_commands(kitchen: Simulator) -> None:
    assert kitchen.reset() == f"-= Welcome to TextWorld, ALFRED! =-\n\n{ROOM}\n\nYour task is to: {TASK}"
    assert kitchen.admissible() == [
        "go to coffeemachine 1",
        "go to countertop 1",
        "go to fridge 1",
        "go to sinkbasin 1",
        "help",
        "inventory",
        "look",
    ]
    play(kitchen, [("look", "You are in the middle of a room. Looking quickly around you, you see nothing.")])


def test_instances_are_numbered_in_descending_id_order(kitchen: Simulator) -> None:
    # apple_bar_1 < apple_bar_2, so the first gets the last number.
    assert kitchen.names["apple_bar_1"] == "apple 2"
    assert kitchen.names["apple_bar_2"] == "apple 1"


def test_a_whole_episode(kitchen: Simulator) -> None:
    on_top = "On the countertop 1, you see a apple 2, a desklamp 1, a knife 1, and a mug 1."
    play(
        kitchen,
        [
            ("go to countertop 1", f"You arrive at countertop 1. {on_top}"),
            ("go to coffeemachine 1", "Nothing happens."),  # at the same place: nowhere to go
            ("examine coffeemachine 1", "On the coffeemachine 1, you see a mug 1."),
            ("look", "You are facing the coffeemachine 1, and countertop 1. Next to it, you see nothing."),
            ("examine apple 2", "Nothing happens."),  # only held objects
            ("take apple 2 from countertop 1", "You pick up the apple 2 from the countertop 1."),
            ("take mug 1 from countertop 1", "Nothing happens."),  # hands are full
            ("examine apple 2", "There's nothing special about apple 2."),
            ("inventory", "You are carrying: a apple 2."),
            ("go to sinkbasin 1", "You arrive at sinkbasin 1. On the sinkbasin 1, you see a mirror 1."),
            ("clean apple 2 with sinkbasin 1", "You clean the apple 2 using the sinkbasin 1."),
            ("move apple 2 to sinkbasin 1", "Nothing happens."),  # sinks hold no apples here
            ("go to fridge 1", "You arrive at fridge 1. The fridge 1 is closed."),
            ("move apple 2 to fridge 1", "Nothing happens."),  # closed
            ("cool apple 2 with fridge 1", "You cool the apple 2 using the fridge 1."),  # cooling needs no open door
            ("open fridge 1", "You open the fridge 1. The fridge 1 is open. In it, you see a apple 1."),
            ("close fridge 1", "You close the fridge 1."),
            ("examine apple 2", "This is a cool and clean apple 2."),
            (" go to countertop 1 ", "You arrive at countertop 1. " + on_top.replace("a apple 2, ", "")),
        ],
    )
    assert not kitchen.won
    assert kitchen.step("move apple 2 to countertop 1") == ("You move the apple 2 to the countertop 1.", True)
    play(kitchen, [("inventory", "You are not carrying anything.")])


def test_object_in_two_receptacles_leaves_them_one_by_one(kitchen: Simulator) -> None:
    kitchen.step("go to countertop 1")
    assert {"take mug 1 from countertop 1", "take mug 1 from coffeemachine 1"} <= set(kitchen.admissible())
    kitchen.step("take mug 1 from countertop 1")
    play(
        kitchen,
        [
            ("examine coffeemachine 1", "On the coffeemachine 1, you see a mug 1."),
            ("examine mug 1", "This is a normal mug 1. In it, you see nothing."),
        ],
    )


def test_what_was_taken_out_lies_beside_its_old_place() -> None:
    # The knife goes from the counter to the coffee machine at the same place: it was taken out of the counter.
    text = KITCHEN.replace("(canContain FridgeType", "(canContain CoffeeMachineType KnifeType) (canContain FridgeType")
    sim = Simulator(game_from_problem(text, TASK))
    for command in ("go to countertop 1", "take knife 1 from countertop 1", "move knife 1 to coffeemachine 1"):
        sim.step(command)
    facing = "You are facing the coffeemachine 1, and countertop 1. Next to it, you see"
    play(sim, [("look", f"{facing} a knife 1.")])
    for command in ("take knife 1 from coffeemachine 1", "move knife 1 to countertop 1"):
        sim.step(command)
    play(sim, [("look", f"{facing} a knife 1.")])  # now it was taken out of the coffee machine
    text = text.replace("(inReceptacle Knife_bar_1 CounterTop_bar_1)", "(inReceptacle Knife_bar_1 Fridge_bar_1)")
    sim = Simulator(game_from_problem(text.replace("(canContain CounterTopType KnifeType)", ""), TASK))
    for command in ("go to fridge 1", "open fridge 1", "take knife 1 from fridge 1", "go to coffeemachine 1"):
        sim.step(command)
    sim.step("move knife 1 to coffeemachine 1")
    play(sim, [("look", f"{facing} nothing.")])  # taken out elsewhere


def test_nothing_is_taken_through_a_closed_door(kitchen: Simulator) -> None:
    kitchen.step("go to fridge 1")
    play(kitchen, [("take apple 1 from fridge 1", "Nothing happens.")])
    kitchen.step("open fridge 1")
    play(kitchen, [("take apple 1 from fridge 1", "You pick up the apple 1 from the fridge 1.")])


def test_put_back_is_not_beside(kitchen: Simulator) -> None:
    for command in ("go to countertop 1", "take knife 1 from countertop 1", "move knife 1 to countertop 1"):
        kitchen.step(command)
    play(kitchen, [("look", "You are facing the coffeemachine 1, and countertop 1. Next to it, you see nothing.")])


def test_heat_and_cold_replace_each_other() -> None:
    text = KITCHEN.replace("CoffeeMachine_bar_1 CoffeeMachineType", "CoffeeMachine_bar_1 MicrowaveType")
    text = text.replace("CoffeeMachineType - rtype", "MicrowaveType - rtype").replace(
        "(cleanable Apple_bar_1)", "(heatable Apple_bar_1)"
    )
    sim = Simulator(game_from_problem(text, TASK))
    for command in ("go to countertop 1", "take apple 2 from countertop 1", "heat apple 2 with coffeemachine 1"):
        sim.step(command)
    play(sim, [("examine apple 2", "This is a hot apple 2.")])
    for command in ("go to fridge 1", "cool apple 2 with fridge 1"):
        sim.step(command)
    play(sim, [("examine apple 2", "This is a cold apple 2.")])
    for command in ("go to coffeemachine 1", "heat apple 2 with coffeemachine 1"):
        sim.step(command)
    play(sim, [("examine apple 2", "This is a hot apple 2.")])
    assert sim.hot == {"apple_bar_1"}
    assert not sim.cool


def test_a_goal_about_the_place_holds_only_there() -> None:
    goal = "(:goal (and (exists (?a - agent) (atLocation ?a loc_bar_2))))"
    sim = Simulator(game_from_problem(KITCHEN[: KITCHEN.index("(:goal")] + goal + ")", TASK))
    won = [sim.step(command)[1] for command in ("look", "go to fridge 1", "look", "go to sinkbasin 1")]
    assert won == [False, True, True, False]


def test_slice_needs_a_held_knife_and_use_needs_nothing(kitchen: Simulator) -> None:
    kitchen.step("go to countertop 1")
    assert "slice apple 2 with knife 1" not in kitchen.admissible()
    kitchen.step("take apple 2 from countertop 1")
    assert "slice apple 2 with apple 2" not in kitchen.admissible()
    kitchen.step("move apple 2 to countertop 1")
    play(
        kitchen,
        [
            ("take knife 1 from countertop 1", "You pick up the knife 1 from the countertop 1."),
            ("slice apple 2 with knife 1", "You sliced the apple 2 with the knife 1."),
            ("use desklamp 1", "You turn on the desklamp 1."),
            ("use desklamp 1", "You turn on the desklamp 1."),
            ("move knife 1 to countertop 1", "You move the knife 1 to the countertop 1."),
            ("take apple 2 from countertop 1", "You pick up the apple 2 from the countertop 1."),
            ("examine apple 2", "This is a sliced apple 2."),
        ],
    )


@pytest.mark.parametrize("kind", ["KnifeType", "ButterKnifeType"])
def test_only_what_is_here_can_be_sliced(kind: str) -> None:
    sim = Simulator(game_from_problem(KITCHEN.replace("KnifeType", kind), TASK))
    sim.step("go to countertop 1")
    for command in ("take apple 2 from countertop 1", "go to fridge 1", "open fridge 1", "move apple 2 to fridge 1"):
        sim.step(command)
    for command in ("go to countertop 1", "take knife 1 from countertop 1"):
        sim.step(command)
    assert "slice apple 2 with knife 1" not in sim.admissible()
    sim.step("go to fridge 1")
    assert "slice apple 2 with knife 1" in sim.admissible()


def test_put_dialect() -> None:
    sim = Simulator(game_from_problem(KITCHEN, TASK, dialect="put"))
    # Locations are numbered like everything else: loc_bar_0 ... loc_bar_3 are loc 4 ... loc 1.
    assert sim.step("go to countertop 1")[0].startswith("You arrive at loc 1. On the countertop 1")
    sim.step("take knife 1 from countertop 1")
    assert "help" not in sim.admissible()
    play(sim, [("put knife 1 in/on countertop 1", "You put the knife 1 in/on the countertop 1.")])


def test_snapshot_is_a_value(kitchen: Simulator) -> None:
    kitchen.step("go to countertop 1")
    before, commands = kitchen.snapshot(), kitchen.admissible()
    kitchen.step("take apple 2 from countertop 1")
    kitchen.step("go to fridge 1")
    kitchen.step("open fridge 1")
    after = kitchen.snapshot()
    assert before != after
    for _ in range(2):
        kitchen.restore(before)
        assert (kitchen.snapshot(), kitchen.admissible()) == (before, commands)
        kitchen.restore(after)
        assert kitchen.inventory == ("apple 2",)
        assert kitchen.last_text.startswith("You open the fridge 1.")


def test_random_play_restores_and_resets_exactly() -> None:
    rng = random.Random(0)
    for number, kind in enumerate(GOALS):
        sim = Simulator(random_game(number, 7, kind))
        first = sim.snapshot()
        trail = []
        for _ in range(60):
            trail.append((sim.snapshot(), sim.admissible(), sim.won))
            sim.step(rng.choice(sim.admissible()))
        for snapshot, commands, won in reversed(trail):
            sim.restore(snapshot)
            assert (sim.admissible(), sim.won) == (commands, won)
        sim.step(rng.choice(sim.admissible()))
        sim.reset()
        assert sim.snapshot() == first


# --- Goals: the compiled formula against a direct reading of the definition -------------------------------------------


def naive(node: Expression, binding: Mapping[str, str], objects: Mapping[str, str], facts: frozenset[Fact]) -> bool:
    """PDDL semantics word for word."""
    head, rest = node[0], node[1:]
    if head in ("exists", "forall"):
        names = [name for name, _ in rest[0]]
        ranges = [[o for o, kind in objects.items() if want in ("object", kind)] for _, want in rest[0]]
        cases = (naive(rest[1], {**binding, **dict(zip(names, c, strict=True))}, objects, facts)
                 for c in itertools.product(*ranges))  # fmt: skip
        return any(cases) if head == "exists" else all(cases)
    if head == "not":
        return not naive(rest[0], binding, objects, facts)
    if head == "and":
        return all(naive(part, binding, objects, facts) for part in rest)
    if head == "or":
        return any(naive(part, binding, objects, facts) for part in rest)
    if head == "imply":
        return not naive(rest[0], binding, objects, facts) or naive(rest[1], binding, objects, facts)
    terms = tuple(binding.get(term, term) for term in rest)
    return terms[0] == terms[1] if head == "=" else (head, *terms) in facts


OBJECTS = {"a1": "agent", "l1": "location", "o1": "object", "o2": "object", "o3": "object", "r1": "receptacle",
           "r2": "receptacle", "t": "otype", "u": "rtype"}  # fmt: skip
CONDITIONS = [
    "(and (exists (?r - receptacle ?o - object) (and (rt ?r u) (in ?o ?r) (ot ?o t))))",
    "(exists (?o - object) (and (ot ?o t) (exists (?p - object ?r - receptacle) (and (not (= ?o ?p)) (ot ?p t)"
    " (in ?o ?r) (in ?p ?r)))))",
    "(and (forall (?r - receptacle) (not (opened ?r))) (exists (?o - object) (and (ot ?o t) (in ?o r1))))",
    "(forall (?o - object) (imply (ot ?o t) (or (in ?o r1) (opened r2))))",
    "(or (not (exists (?r - receptacle) (and (rt ?r u) (opened ?r)))) (in o1 r2))",
]


@pytest.mark.parametrize("text", CONDITIONS)
def test_ground_formula_means_what_the_condition_means(text: str) -> None:
    goal = parse_problem(
        f"(define (problem p) (:domain d) (:objects {' '.join(f'{o} - {k}' for o, k in OBJECTS.items())})"
        f" (:init) (:goal {text}))"
    ).goal
    rng = random.Random(text)
    outcomes = set()
    for _ in range(150):
        pool = [("ot", o, "t") for o in ("o1", "o2", "o3")] + [("rt", r, "u") for r in ("r1", "r2")]
        static = frozenset(fact for fact in pool if rng.random() < 0.6)
        pool = [("in", o, r) for o in ("o1", "o2", "o3") for r in ("r1", "r2")] + [("opened", r) for r in ("r1", "r2")]
        state = frozenset(fact for fact in pool if rng.random() < rng.random())
        formula = Grounder(OBJECTS, static, frozenset({"in", "opened"})).ground(goal)
        check = compile_formula(formula, lambda fact: lambda now: fact in now)
        expected = naive(goal, {}, OBJECTS, static | state)
        assert check(state) == expected
        outcomes.add(expected)
    assert outcomes == {True, False}


# --- Anchors ----------------------------------------------------------------------------------------------------------


def keys(env: AlfworldEnv, *episodes: list[str]) -> list[Any]:
    """The anchor keys at the end of each list of actions."""
    found = []
    for actions in episodes:
        env.reset(kitchen_task())
        for action in actions:
            assert env.step(action).info["valid"], action
        found.append(env.anchor())
    return found


def kitchen_task() -> Task:
    return Task("kitchen", "train", {}, game_from_problem(KITCHEN, TASK))


TAKE_KNIFE = ["go to countertop 1", "take knife 1 from countertop 1"]
TAKE_APPLE = ["go to countertop 1", "take apple 2 from countertop 1"]
AT_SINK = ["go to sinkbasin 1"]
# Pairs of episodes, and the levels at which their last states are the same.
PAIRS = [
    # The same text with another thing in hand: only the text is blind to it.
    (TAKE_KNIFE + AT_SINK, TAKE_APPLE + AT_SINK, {"text"}),
    # A fridge opened and left shows nowhere in text or view, but it holds an apple, which the goal is about.
    (["go to fridge 1", "open fridge 1", *AT_SINK], ["go to fridge 1", *AT_SINK], {"text", "view"}),
    # Another last observation in the same state.
    ([*AT_SINK, "inventory"], AT_SINK, {"task", "full"}),
    # A lamp that was used does not matter to the goal; `full` sees it.
    (["go to countertop 1", "use desklamp 1", *AT_SINK], AT_SINK, {"text", "view", "task"}),
    # A property of a goal object that cannot be seen from here.
    (
        [*TAKE_APPLE, *AT_SINK, "clean apple 2 with sinkbasin 1", "go to fridge 1"],
        [*TAKE_APPLE, *AT_SINK, "go to fridge 1"],
        {"text", "view"},
    ),
]


@pytest.mark.parametrize("level", ["text", "view", "task", "full"])
@pytest.mark.parametrize(("first", "second", "same_at"), PAIRS)
def test_anchor_levels_separate_what_they_name(
    level: str, first: list[str], second: list[str], same_at: set[str]
) -> None:
    one, other = keys(AlfworldEnv(anchor=level), first, second)
    assert (one == other) == (level in same_at)


def test_another_object_in_another_place_is_task_relevant_only_in_hand() -> None:
    env = AlfworldEnv(anchor="task")
    held, put_back, untouched = keys(
        env, TAKE_KNIFE, [*TAKE_KNIFE, "move knife 1 to countertop 1"], ["go to countertop 1"]
    )
    assert held != untouched
    assert put_back == untouched


def test_keys_and_commands_are_the_same_in_every_process() -> None:
    code = (
        "import random; from tests.alfworld_problems import random_game;"
        "from gigpo_lightning.envs.alfworld import AlfworldEnv; from gigpo_lightning.envs.base import Task\n"
        "for level in ('text', 'view', 'task', 'full'):\n"
        "    g = random_game(5, 8, 'pick_two_obj_and_place')\n"
        "    e = AlfworldEnv(level); print(e.reset(Task('t', 'train', {}, g)))\n"
        "    r = random.Random(1)\n"
        "    for _ in range(25): print(e.step(r.choice(e.admissible_actions())), e.anchor())\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."}, check=True,
            capture_output=True, text=True, cwd=Path(__file__).parents[1],
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(outputs) == 1


# --- Environment ------------------------------------------------------------------------------------------------------


def test_environment_splits_the_intro_and_rewards_the_win() -> None:
    env = AlfworldEnv(win_reward=10.0)
    first = env.reset(kitchen_task())
    assert (first.text, first.instruction) == (ROOM, TASK)
    solution = [*TAKE_APPLE, "go to fridge 1", "cool apple 2 with fridge 1", "go to countertop 1"]
    for action in solution:
        result = env.step(action)
        assert (result.reward, result.terminated, result.info) == (0.0, False, {"won": False, "valid": True})
    bad = env.step("juggle")
    assert bad.observation.text == "Nothing happens."
    assert bad.info == {"won": False, "valid": False}
    last = env.step("move apple 2 to countertop 1")
    assert (last.reward, last.terminated, last.truncated, last.info["won"]) == (10.0, True, False, True)
    assert env.reset(kitchen_task()) == first
    assert env.admissible_actions() == sorted(set(env.admissible_actions()))


def write_game(folder: Path, **changes: Any) -> Path:
    data = {
        "pddl_domain": DOMAIN_MARKER,
        "grammar": marker_grammar(TASK),
        "pddl_problem": KITCHEN,
        "walkthrough": ["look"],
        "solvable": True,
    }
    path = folder / "game.tw-pddl"
    path.write_text(json.dumps({**data, **changes}))
    return path


def test_a_group_loads_its_file_once_and_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, loads = write_game(tmp_path), []
    monkeypatch.setattr(env_module, "load_game", lambda one: loads.append(one) or load_game(one))
    task = Task("kitchen", "train", {}, str(path))
    for env in (AlfworldEnv(), AlfworldEnv(), AlfworldEnv()):
        assert env.reset(task).instruction == TASK
        assert env.reset(task).instruction == TASK
    assert len(loads) == 1
    write_game(tmp_path, grammar=marker_grammar("chill."))
    assert AlfworldEnv().reset(task).instruction == "chill."
    assert len(loads) == 2


def test_game_travels_as_text() -> None:
    game = game_from_problem(KITCHEN, TASK)
    copied = pickle.loads(pickle.dumps(game))
    assert copied == game
    assert "layout" not in copied.__dict__  # what is worked out stays at home
    assert Simulator(copied).reset() == Simulator(game).reset()


def test_game_file_with_markers(tmp_path: Path) -> None:
    (tmp_path / "traj_data.json").write_text('{"task_type": "pick_cool_then_place_in_recep"}')
    game = load_game(write_game(tmp_path))
    assert game == GameData(KITCHEN, TASK, "move", "pick_cool_then_place_in_recep", ("look",))


DOMAIN = "(define (domain alfred) (:types agent) (:action look :parameters () :precondition () :effect ()))"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pddl_domain": DOMAIN}, r"unknown ':types' action.*engine: textworld.*'\.\[textworld\]'"),
        ({"pddl_domain": "(define"}, "left open"),
        ({"grammar": 'grammar :: """ {"intro": [{"rhs": "hi"}]} """;'}, "no action '.*engine: textworld"),
        ({"grammar": "once upon a time"}, "malformed at 'once upon"),
        ({"grammar": 'grammar :: """ {"intro": """;'}, "malformed JSON"),
        ({"pddl_problem": KITCHEN[:-40]}, "left open"),
        ({"pddl_problem": 3}, "no text 'pddl_problem'"),
    ],
)
def test_bad_game_file_is_named_with_its_fault(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write_game(tmp_path, **changes)
    with pytest.raises(ValueError, match=message) as error:
        load_game(path)
    assert str(path) in str(error.value)


def test_missing_and_cut_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        load_game(tmp_path / "game.tw-pddl")
    path = write_game(tmp_path)
    path.write_text(path.read_text()[:100])
    with pytest.raises(ValueError, match="no JSON"):
        AlfworldEnv().reset(Task("t", "train", {}, path))


def test_wrong_options_name_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"anchor must be one of text, view, task, full.*'state'"):
        AlfworldEnv(anchor="state")
    with pytest.raises(ValueError, match="engine must be one of native, textworld; got 'thor'"):
        AlfworldEnv(engine="thor")
    with pytest.raises(ValueError, match="text, view, full with engine: textworld"):
        AlfworldEnv(anchor="task", engine="textworld")
    with pytest.raises(ValueError, match="dialect must be one of move, put"):
        game_from_problem(KITCHEN, TASK, dialect="drop")
    with pytest.raises(TypeError, match="path or a GameData; got int"):
        AlfworldEnv().reset(Task("t", "train", {}, 3))
    with pytest.raises(RuntimeError, match="reset"):
        AlfworldEnv().step("look")


def test_problems_of_every_type_and_size_load() -> None:
    for kind in GOALS:
        for receptacles in (5, 18, 44):
            problem = random_problem(receptacles, receptacles, kind)
            sim = Simulator(game_from_problem(problem, "try"))
            assert len(sim.layout.receptacles) == receptacles
            assert sim.layout.goal_objects
