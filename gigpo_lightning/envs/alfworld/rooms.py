"""The facts of the household world: which rooms hold which furniture, and what fits where.

Plain tables in the simulator's own spelling (`CounterTop`, `SoapBar`). Nothing here is random and nothing knows about
goals or text. `canContain` in a problem file follows from `holders`, so generated rooms obey the recorded games' rules.
"""

from __future__ import annotations

from dataclasses import dataclass

ROOMS = ("kitchen", "livingroom", "bedroom", "bathroom")
# Floor plans of the recorded games: kitchens 1-30, living rooms 201-230, bedrooms 301-330, bathrooms 401-430.
FIRST_SCENE = {"kitchen": 1, "livingroom": 201, "bedroom": 301, "bathroom": 401}
SCENES_PER_ROOM = 30

OPENABLE = frozenset({"Fridge", "Cabinet", "Microwave", "Drawer", "Safe"})
MOVABLE_RECEPTACLES = frozenset({"Bowl", "Box", "Cup", "Mug", "Pan", "Plate", "Pot"})
# Basins are parts of another thing: their identifiers start with the whole's name and end with their own.
BASINS = {"SinkBasin": "Sink", "BathtubBasin": "Bathtub"}
LAMP_HOLDERS = ("CoffeeTable", "Desk", "Dresser", "Shelf", "SideTable")
# Furniture whose space the simulator counts to its neighbour too: what lies in the first may lie in the second as well.
OVERLAPS = {
    "StoveBurner": ("CounterTop",),
    "CoffeeMachine": ("CounterTop",),
    "SinkBasin": ("CounterTop",),
    "Drawer": ("Desk", "Dresser", "SideTable", "CounterTop"),
    "Shelf": ("Dresser", "Desk"),
    "Safe": ("Dresser",),
}

# Most receptacles of each type in one room of that kind.
FURNITURE: dict[str, dict[str, int]] = {
    "kitchen": {
        "CounterTop": 4,
        "Cabinet": 20,
        "Drawer": 13,
        "DiningTable": 3,
        "SideTable": 1,
        "Shelf": 3,
        "StoveBurner": 6,
        "Fridge": 1,
        "Microwave": 1,
        "SinkBasin": 1,
        "CoffeeMachine": 1,
        "Toaster": 1,
        "GarbageCan": 1,
    },
    "livingroom": {
        "Sofa": 2,
        "ArmChair": 3,
        "CoffeeTable": 2,
        "SideTable": 4,
        "DiningTable": 2,
        "Desk": 1,
        "Dresser": 2,
        "TVStand": 1,
        "Ottoman": 1,
        "Drawer": 19,
        "Cabinet": 8,
        "Shelf": 14,
        "Safe": 1,
        "Cart": 1,
        "GarbageCan": 1,
    },
    "bedroom": {
        "Bed": 2,
        "Desk": 2,
        "SideTable": 3,
        "Dresser": 2,
        "ArmChair": 2,
        "Ottoman": 1,
        "CoffeeTable": 1,
        "Drawer": 14,
        "Cabinet": 4,
        "Shelf": 14,
        "Safe": 1,
        "LaundryHamper": 1,
        "GarbageCan": 1,
    },
    "bathroom": {
        "CounterTop": 2,
        "SinkBasin": 2,
        "Toilet": 1,
        "BathtubBasin": 1,
        "Cabinet": 10,
        "Drawer": 13,
        "Shelf": 6,
        "SideTable": 1,
        "Dresser": 1,
        "Cart": 1,
        "TowelHolder": 2,
        "HandTowelHolder": 2,
        "ToiletPaperHanger": 1,
        "GarbageCan": 1,
    },
}

# Listed but never picked up: type -> the receptacles it may stand in (empty: it has a place of its own in the room).
FIXTURES: dict[str, dict[str, tuple[str, ...]]] = {
    "kitchen": {
        "Window": ("CounterTop",),
        "Sink": ("CounterTop",),
        "StoveKnob": ("CounterTop",),
        "HousePlant": ("CounterTop", "DiningTable"),
        "LightSwitch": (),
        "Chair": (),
        "Blinds": (),
    },
    "livingroom": {
        "Television": ("TVStand", "Dresser"),
        "HousePlant": ("SideTable", "DiningTable", "CoffeeTable"),
        "Mirror": ("Dresser",),
        "FloorLamp": (),
        "Painting": (),
        "Window": (),
        "LightSwitch": (),
    },
    "bedroom": {
        "Mirror": ("Dresser",),
        "Window": ("Desk",),
        "HousePlant": ("Desk", "Dresser", "Shelf"),
        "Blinds": (),
        "Chair": (),
        "LightSwitch": (),
        "Painting": (),
    },
    "bathroom": {
        "Mirror": ("CounterTop",),
        "Sink": ("CounterTop",),
        "Window": ("BathtubBasin",),
        "ShowerDoor": (),
        "LightSwitch": (),
        "Bathtub": (),
    },
}


@dataclass(frozen=True, slots=True)
class ObjectType:
    """What one type of portable object allows. `rooms` are the kinds of room it is found in."""

    name: str
    rooms: frozenset[str]
    holders: frozenset[str]
    cleanable: bool
    heatable: bool
    coolable: bool
    sliceable: bool


# name | rooms: Kitchen, Living room, Bedroom, baThroom | can be: Cleaned, Heated, cOoled, Sliced | holders.
# "tables" stands for the four kinds of table top, "seats" for armchair, ottoman, sofa, "desks" for desk and dresser,
# "bath" for basins, cart and toilet.
_OBJECT_TABLE = """
AlarmClock      | B   |      | tables desks Shelf
Apple           | K   | CHOS | tables Fridge GarbageCan Microwave SinkBasin
BaseballBat     | B   |      | tables Bed
BasketBall      | B   |      | tables desks seats Bed
Book            | KLB |      | tables desks seats Bed Cabinet Drawer Shelf
Bowl            | KLB | CO   | tables desks Cabinet Fridge Microwave Shelf SinkBasin
Box             | LB  |      | tables desks seats Cabinet Shelf
Bread           | K   | HOS  | tables Fridge GarbageCan Microwave
ButterKnife     | K   | C    | tables Drawer SinkBasin
CD              | B   |      | tables desks Cabinet Drawer GarbageCan Safe Shelf
Candle          | LT  |      | tables desks Cabinet Cart Drawer Shelf Toilet
CellPhone       | KLB |      | tables desks seats Bed Drawer Safe Shelf
Cloth           | BT  | C    | tables desks seats bath Cabinet Drawer GarbageCan LaundryHamper Shelf
CreditCard      | KLB |      | tables desks seats Drawer Safe Shelf
Cup             | K   | CHO  | tables desks Cabinet Fridge Microwave Shelf SinkBasin
DishSponge      | KT  | C    | tables bath Cabinet Drawer GarbageCan Shelf
Egg             | K   | CHOS | tables Fridge GarbageCan Microwave SinkBasin
Fork            | K   | C    | tables Drawer SinkBasin
Glassbottle     | K   |      | tables desks Cabinet Fridge Microwave Shelf SinkBasin
HandTowel       | T   |      | tables bath Cabinet Drawer GarbageCan HandTowelHolder Shelf
Kettle          | K   | C    | tables Cabinet Shelf SinkBasin StoveBurner
KeyChain        | LB  |      | tables desks seats Drawer Safe Shelf
Knife           | K   | C    | tables Drawer SinkBasin
Ladle           | K   | C    | tables Cabinet Drawer SinkBasin
Laptop          | LB  |      | tables desks seats Bed
Lettuce         | K   | COS  | tables Fridge GarbageCan SinkBasin
Mug             | KB  | CHO  | tables desks Cabinet Cart CoffeeMachine Fridge Microwave Shelf SinkBasin
Newspaper       | L   |      | tables desks seats Bed Cabinet Drawer GarbageCan Shelf Toilet
Pan             | K   | CO   | tables Cabinet Fridge SinkBasin StoveBurner
Pen             | LB  |      | tables desks Drawer GarbageCan Shelf
Pencil          | LB  |      | tables desks Drawer GarbageCan Shelf
PepperShaker    | K   |      | tables Cabinet Drawer Shelf
Pillow          | LB  |      | seats Bed
Plate           | KL  | CHO  | tables desks Cabinet Fridge Microwave Shelf SinkBasin
Plunger         | T   |      | Cabinet Cart
Pot             | K   | CO   | tables Cabinet Fridge Shelf SinkBasin StoveBurner
Potato          | K   | CHOS | tables Fridge GarbageCan Microwave SinkBasin
RemoteControl   | LB  |      | tables desks seats Drawer Shelf
SaltShaker      | K   |      | tables Cabinet Drawer Shelf
SoapBar         | T   | C    | tables bath Cabinet Drawer GarbageCan Shelf
SoapBottle      | KT  |      | tables Desk Cabinet Cart Drawer GarbageCan Shelf Toilet
Spatula         | K   | C    | tables Drawer SinkBasin
Spoon           | K   | C    | tables Drawer SinkBasin
SprayBottle     | T   |      | tables desks Cabinet Cart Drawer GarbageCan Shelf Toilet
Statue          | LB  |      | tables desks Cart Safe Shelf
TennisRacket    | B   |      | tables desks Bed
TissueBox       | LT  |      | tables desks Cabinet Cart Drawer GarbageCan Shelf TVStand Toilet
ToiletPaper     | T   |      | tables desks Cabinet Cart Drawer GarbageCan Shelf Toilet ToiletPaperHanger
Tomato          | K   | CHOS | tables Fridge GarbageCan Microwave SinkBasin
Towel           | T   |      | TowelHolder
Vase            | LB  |      | tables desks Cabinet Cart Safe Shelf
Watch           | LB  |      | tables desks Drawer Safe Shelf
WateringCan     | L   |      | tables desks Cabinet Drawer Shelf
WineBottle      | K   | O    | tables desks Cabinet Fridge GarbageCan Shelf
"""
_FAMILIES = {
    "tables": ("CoffeeTable", "CounterTop", "DiningTable", "SideTable"),
    "seats": ("ArmChair", "Ottoman", "Sofa"),
    "desks": ("Desk", "Dresser"),
    "bath": ("BathtubBasin", "Cart", "SinkBasin", "Toilet"),
}
_ROOM_LETTERS = dict(zip("KLBT", ROOMS, strict=True))


def _read_table() -> dict[str, ObjectType]:
    types = {}
    for line in _OBJECT_TABLE.strip().splitlines():
        name, rooms, traits, holders = (cell.strip() for cell in line.split("|"))
        types[name] = ObjectType(
            name=name,
            rooms=frozenset(_ROOM_LETTERS[letter] for letter in rooms),
            holders=frozenset(holder for word in holders.split() for holder in _FAMILIES.get(word, (word,))),
            cleanable="C" in traits,
            heatable="H" in traits,
            coolable="O" in traits,
            sliceable="S" in traits,
        )
    return types


OBJECTS: dict[str, ObjectType] = _read_table()
ROOM_OBJECTS: dict[str, tuple[ObjectType, ...]] = {
    room: tuple(kind for kind in OBJECTS.values() if room in kind.rooms) for room in ROOMS
}

# What the recorded problem files declare, whether or not the room has it: all object types, portable or not, and all
# receptacle types.
_FURTHER_OBJECTS = (
    "Bathtub",
    "Blinds",
    "Boots",
    "Chair",
    "Curtains",
    "DeskLamp",
    "FloorLamp",
    "Footstool",
    "HousePlant",
    "LaundryHamperLid",
    "LightSwitch",
    "Mirror",
    "Painting",
    "PaperTowel",
    "PaperTowelRoll",
    "Poster",
    "ScrubBrush",
    "ShowerDoor",
    "ShowerGlass",
    "Sink",
    "StoveKnob",
    "TeddyBear",
    "Television",
    "ToiletPaperRoll",
    "Window",
)
DECLARED_OBJECTS = tuple(sorted({*OBJECTS, *_FURTHER_OBJECTS}))
DECLARED_RECEPTACLES = tuple(sorted({"PaintingHanger", *(kind for room in FURNITURE.values() for kind in room)}))


def can_contain(receptacle_type: str, object_type: str) -> bool:
    """Whether an object of `object_type` may be put into a receptacle of `receptacle_type`."""
    kind = OBJECTS.get(object_type)
    return kind is not None and receptacle_type in kind.holders
