"""The words of the world, for a policy that makes its own tokenizer: types, numbers, verbs and the fixed phrases.

With longest match first, a sentence costs few tokens: a listed thing takes three (", a", its type, its number).
"""

from __future__ import annotations

from gigpo_lightning.envs.alfworld import text as say
from gigpo_lightning.envs.alfworld.rooms import DECLARED_OBJECTS, DECLARED_RECEPTACLES

LARGEST_NUMBER = 60
# Words of the recorded rooms that no problem file declares; "loc" is a place in the older data's text.
_FURTHER_WORDS = ("faucet", "lamp", "loc", "showercurtain", "showerhead")
_COMMANDS = (
    *("go to", "take", "from", "move", "to", "put", "in/on", "open", "close", "examine", "use", "with"),
    *("clean", "heat", "cool", "slice", "look", "inventory", "help"),
)
# What is to be done stands as a word of its own: a policy that copies what it reads finds the command in the goal.
_INSTRUCTIONS = (
    *("put a", "put two", "find two", "some", "a", "in", "on", "and put it in", "and put them in"),
    *("look at", "under the", "examine the", "with the"),
)
_SENTENCES = (
    "You are in the middle of a room. Looking quickly around you, you see",
    "You are facing the",
    ". Next to it, you see",
    "You arrive at",
    ". On the",
    "On the",
    ", you see",
    ". The",
    "The",
    "is closed.",
    "is open. In it, you see",
    "You open the",
    "You close the",
    "You pick up the",
    "from the",
    "You move the",
    "to the",
    "You put the",
    "in/on the",
    "You clean the",
    "You heat the",
    "You cool the",
    "using the",
    "You sliced the",
    "You turn on the",
    "You turn off the",
    "You are carrying:",
    "There's nothing special about",
    "This is a normal",
    ". In it, you see",
    "This is a",
    "This",
    "hot and clean",
    "cool and clean",
    "clean",
    "hot",
    "cold",
    "cool",
    "sliced",
    "is on.",
    "is off.",
    ", a",
    ", and a",
    ", and",
    "nothing",
    say.NOTHING_HAPPENS,
    say.EMPTY_HANDED,
    say.BANNER,
    say.TASK_PREFIX.strip(),
)


def vocabulary() -> list[str]:
    """All words and phrases, sorted, without repetitions."""
    entries = {kind.lower() for kind in (*DECLARED_OBJECTS, *DECLARED_RECEPTACLES)} | set(_FURTHER_WORDS)
    entries |= {str(number) for number in range(1, LARGEST_NUMBER + 1)}
    entries |= {*_COMMANDS, *_INSTRUCTIONS, *_SENTENCES, say.help_text().strip()}
    for sentence in _SENTENCES:
        if sentence.endswith("you see"):
            entries |= {f"{sentence} a", f"{sentence} nothing."}
    entries.add("You are carrying: a")
    return sorted(entries)
