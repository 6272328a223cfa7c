"""Small ALFRED problems for tests: a random room with the oddities that real rooms have."""

from __future__ import annotations

import random

from gigpo_lightning.envs.alfworld.game import GameData, game_from_problem

OPENABLE = {"Cabinet", "Drawer", "Fridge", "Microwave", "Safe"}
RECEPTACLES = ("Cabinet", "CounterTop", "Drawer", "Fridge", "Microwave", "Sink", "SideTable", "Shelf", "Safe", "Desk")
# Object type -> affordances: (c)leanable, (h)eatable, c(o)olable, (s)liceable, (t)oggleable, (b)owl-like, (p)ickupable
THINGS = {
    "Apple": "chosp", "Potato": "chosp", "Mug": "chobp", "Knife": "cp", "ButterKnife": "cp", "Bowl": "cobp",
    "DeskLamp": "t", "Window": "", "Mirror": "", "Book": "p", "Cloth": "cp", "CellPhone": "tp",
}  # fmt: skip
AFFORDANCES = {"c": "cleanable", "h": "heatable", "o": "coolable", "s": "sliceable", "t": "toggleable",
               "b": "isReceptacleObject", "p": "pickupable"}  # fmt: skip

GOALS = {
    "pick_and_place_simple": """(exists (?r - receptacle) (exists (?o - object) (and (inReceptacle ?o ?r)
        (objectType ?o {obj}Type) (receptacleType ?r {recep}Type))))""",
    "pick_clean_then_place_in_recep": """(exists (?r - receptacle) (exists (?o - object) (and (cleanable ?o)
        (objectType ?o {obj}Type) (receptacleType ?r {recep}Type) (isClean ?o) (inReceptacle ?o ?r))))""",
    "pick_heat_then_place_in_recep": """(exists (?r - receptacle) (exists (?o - object) (and (heatable ?o)
        (objectType ?o {obj}Type) (receptacleType ?r {recep}Type) (isHot ?o) (inReceptacle ?o ?r))))""",
    "pick_cool_then_place_in_recep": """(exists (?r - receptacle) (exists (?o - object) (and (coolable ?o)
        (objectType ?o {obj}Type) (receptacleType ?r {recep}Type) (isCool ?o) (inReceptacle ?o ?r))))""",
    "pick_two_obj_and_place": """(exists (?r - receptacle) (exists (?o1 - object) (and (objectType ?o1 {obj}Type)
        (receptacleType ?r {recep}Type) (inReceptacle ?o1 ?r) (exists (?o2 - object) (and (not (= ?o1 ?o2))
        (objectType ?o2 {obj}Type) (receptacleType ?r {recep}Type) (inReceptacle ?o2 ?r))))))""",
    "look_at_obj_in_light": """(exists (?ot - object ?r - receptacle ?a - agent ?l - location) (and
        (objectType ?ot DeskLampType) (toggleable ?ot) (isToggled ?ot) (receptacleAtLocation ?r ?l) (atLocation ?a ?l)
        (inReceptacle ?ot ?r))) (exists (?o - object ?a - agent) (and (objectType ?o {obj}Type) (holds ?a ?o)))""",
}
GOAL_OBJECT = {"look_at_obj_in_light": "Book"}


def random_problem(seed: int, receptacles: int, task_type: str, shared_places: bool = True) -> str:
    """A room of `receptacles` pieces: some share a place, some objects are in two of them."""
    rng = random.Random(seed)
    # The first five are what the tasks need; three of ten rooms have pieces that share a location.
    kinds = ["Sink", "Microwave", "Fridge", "SideTable", "Desk"][:receptacles]
    kinds += [rng.choice(RECEPTACLES) for _ in range(receptacles - len(kinds))]
    rng.shuffle(kinds)
    objects, facts, places = ["agent1 - agent"], ["(atLocation agent1 loc_bar_0_bar_0)"], ["loc_bar_0_bar_0"]
    pieces: list[tuple[str, str]] = []
    for number, kind in enumerate(kinds):
        position = f"_plus_{rng.randrange(100):02d}_dot_{number:02d}"
        piece = f"{kind}_bar_{position}" + ("_bar_SinkBasin" if kind == "Sink" else "")
        if not (shared_places and len(places) > 1 and rng.random() < 0.3):
            places.append(f"loc_bar_{rng.randrange(-9, 9)}_bar_{number + 1}".replace("-", "_minus_"))
        pieces.append((piece, places[-1]))
        kind = "SinkBasin" if kind == "Sink" else kind
        objects.append(f"{piece} - receptacle")
        facts += [f"(receptacleType {piece} {kind}Type)", f"(receptacleAtLocation {piece} {places[-1]})"]
        if kind in OPENABLE:
            facts += [f"(openable {piece})"] + [f"(opened {piece})"] * (rng.random() < 0.2)
    for kind in [*THINGS, *rng.choices(list(THINGS), k=2 * receptacles)]:
        thing = f"{kind}_bar__plus_{len(objects):02d}_dot_{rng.randrange(100):02d}"
        objects.append(f"{thing} - object")
        facts += [f"(objectType {thing} {kind}Type)"]
        facts += [f"({AFFORDANCES[letter]} {thing})" for letter in THINGS[kind]]
        for piece, place in rng.sample(pieces, k=2 if rng.random() < 0.15 and len(pieces) > 1 else 1):
            facts += [f"(inReceptacle {thing} {piece})", f"(objectAtLocation {thing} {place})"]
        facts += [
            f"({name} {thing})" for name in ("isClean", "isHot", "isCool", "isSliced", "isOn") if rng.random() < 0.1
        ]
    things = [entry.split()[0] for entry in objects if entry.endswith("- object")]
    bowls = [thing for thing in things if thing.startswith(("Bowl", "Mug"))]
    facts += [f"(inReceptacleObject {rng.choice(things)} {rng.choice(bowls)})" for _ in range(3)]
    object_types = [f"{kind}Type" for kind in THINGS]
    piece_types = sorted({f"{kind}Type" for kind in [*RECEPTACLES, "SinkBasin"]})
    # What a goal needs has to be possible: the stock engine cannot load an unsolvable game.
    facts += [
        f"(canContain {r} {o})" for r in piece_types for o in object_types if o == "AppleType" or rng.random() < 0.7
    ]
    goal = GOALS[task_type].format(obj=GOAL_OBJECT.get(task_type, "Apple"), recep=rng.choice(["SideTable", "Fridge"]))
    rng.shuffle(facts)
    declared = [*objects, *(f"{p} - location" for p in places), *(f"{t} - otype" for t in object_types),
                *(f"{t} - rtype" for t in piece_types)]  # fmt: skip
    lines = "\n".join
    return (
        f"(define (problem test)\n(:domain alfred)\n(:objects\n{lines(declared)}\n)\n"
        f"(:init\n{lines(facts)}\n)\n(:goal (and {goal}))\n)\n"
    )


def random_game(
    seed: int, receptacles: int, task_type: str, dialect: str = "move", shared_places: bool = True
) -> GameData:
    """The game of `random_problem`."""
    problem = random_problem(seed, receptacles, task_type, shared_places)
    return game_from_problem(problem, f"do the {task_type.replace('_', ' ')}", dialect, task_type)
