"""Bad input becomes one clear message on stderr and exit code 2; the parser's own messages become short ones.

Knows the parser's wording; nothing about what the options mean.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from gigpo_lightning.suggest import did_you_mean

BAD_INPUT = 2
# Words for the types that the parser names.
_TYPES = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text", "list": "a list"}
_TYPES |= {"Sequence": "a list"}
_NOT_ACCEPTED = re.compile(r"(?:Option|does not accept option) '([^']+)'")
_EXPECTED = re.compile(r"Expected (?:a|an|one of) (?P<type>.+?)\. Got value: (?P<value>.*)", re.DOTALL)
_KEY = re.compile(r'Parser key "(?P<key>[^"]+)":\s*(?P<rest>.*)', re.DOTALL)
_CALLABLE = re.compile(r"expects a function or a callable class: ([^\n]*)")
_CLASS_NAME = re.compile(r"Expected a dot import path string: (\S+)")
# A text for a group of options that may be null.
_GROUP = re.compile(
    r"Subtypes: \[<class '[\w.]+Rule'>, <class 'NoneType'>\].*import path.*Given value: (.*)", re.DOTALL
)
_CLASS_PATH = re.compile(r"Problem with given class_path '([^']+)':\s*(.*)")
_REQUIRED = re.compile(r"the following arguments are required: (.+)|(?:Key|Option) \S?([\w.]+)\S? is required")


class ShortParser(argparse.ArgumentParser):
    """argparse whose errors are exceptions: the caller shows them in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse has to say.

        Raises:
            ValueError: Always.
        """
        raise ValueError(message.removeprefix("argument "))


def fail(message: str) -> NoReturn:
    """Print the message and leave with exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(BAD_INPUT)


def show_traceback() -> bool:
    """Whether the user asked to see where errors come from (`GIGPO_TRACEBACK=1`)."""
    return os.environ.get("GIGPO_TRACEBACK", "") not in ("", "0")


def option_message(
    message: str, options: Sequence[str], classes: Sequence[str], configs: Sequence[Path], given: Sequence[str] = ()
) -> str:
    """The parser's message as one short text.

    Args:
        message: What jsonargparse says.
        options: Known option names, with or without `--`, for suggestions.
        classes: Known class names, for suggestions.
        configs: The configuration files, to point at the line of a bad key.
        given: The command line, to name a key in full of which the parser knows the last part only.
    """
    if message.startswith("unrecognized arguments:"):
        option = message.split(":", 1)[1].split()[0].split("=")[0]
        return f"unknown option {option}{did_you_mean(option, options)}"
    if match := _NOT_ACCEPTED.search(message):
        return _unknown_key(match[1], options, configs, given)
    if match := _REQUIRED.search(message):
        names = re.sub(r"\b(fit|validate|test|predict)\.", "", match[1] or match[2])
        return f"a value is missing: {names}" + ("" if configs else "; choose a configuration: --config alfworld.yaml")
    if match := _KEY.search(message):
        key, rest = _in_full(match["key"], given), match["rest"]
        return f"{key}: {_value_message(rest, classes)}{_line_of(key, configs)}"
    return _one_line(message)


def _unknown_key(key: str, options: Sequence[str], configs: Sequence[Path], given: Sequence[str]) -> str:
    """A key that nothing reads; one of a class's options comes without the keys above it."""
    known = [name.lstrip("-") for name in options]
    if "." in key:
        return f"unknown key {key}{did_you_mean(key, known)}{_line_of(key, configs)}"
    full = _in_full(key, given)
    above = full.removesuffix(key)
    beside = [name.removeprefix(above) for name in known if above and name.startswith(above)]
    hint = did_you_mean(key, beside or [name.rsplit(".")[-1] for name in known])
    there = f" (there are: {', '.join(beside)})" if beside else ""
    return f"unknown key {full}{hint}{there}{_line_of(key, configs)}"


def _in_full(key: str, given: Sequence[str]) -> str:
    """The key with those above it, where exactly one option of the command line ends with it."""
    names = {arg.partition("=")[0].lstrip("-") for arg in given if arg.startswith("--")}
    found = [name for name in names if name.endswith(f".{key}")]
    return found[0] if len(found) == 1 else key


def _value_message(text: str, classes: Sequence[str]) -> str:
    """Why a value does not fit."""
    if "Unable to load config 'null'" in text:
        return "expected named options, got null; leave it out for the defaults"
    if (match := _CLASS_NAME.search(text)) and "NestedArg(" in text:
        return f"its class_path is missing: {match[1]} is no class whose options could be given"
    if match := _GROUP.search(text):
        return f"expected named options (`key: value`), or null, got {_one_line(match[1])}"
    if match := _CLASS_PATH.search(text):
        return f"{match[1]} cannot be used: {_one_line(match[2])}{did_you_mean(match[1].rsplit('.')[-1], classes)}"
    if match := _CALLABLE.search(text):
        return f"cannot be used: {_one_line(match[1])}"
    if match := _CLASS_NAME.search(text):
        return f"unknown class {match[1]}{did_you_mean(match[1], classes)}"
    if "Union subtypes" in text:
        reasons = [line.strip()[2:] for line in text.splitlines() if line.strip().startswith("- ")]
        reasons = [reason for reason in dict.fromkeys(reasons) if "NoneType" not in reason]
        given = text.partition("Given value: ")[2]
        allowed = " or ".join(_expected(reason) for reason in reasons if "Expected" in reason) or "; ".join(reasons[:2])
        return f"expected {allowed or 'nothing (null)'}, got {_one_line(given)}"
    if match := _EXPECTED.search(text):
        return f"expected {_type_words(match['type'])}, got {_one_line(match['value'])}"
    return _one_line(text)


def _expected(reason: str) -> str:
    match = re.search(r"Expected (?:an? )?(.+?)(?:\. Got value.*)?$", reason)
    return _type_words(match[1]) if match else reason


def _type_words(text: str) -> str:
    match = re.fullmatch(r"<class '(?:[\w.]+\.)?(\w+)'>", text.strip())
    name = match[1] if match else text.strip()
    return _TYPES.get(name, name)


def _line_of(key: str, configs: Sequence[Path]) -> str:
    """` (FILE:LINE)` where exactly one line of the files sets the last part of `key`."""
    pattern = re.compile(rf"^[\s-]*{re.escape(key.rsplit('.')[-1])}\s*:")
    places = [
        f"{path}:{number}"
        for path in configs
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if pattern.match(line)
    ]
    return f" ({places[0]})" if len(places) == 1 else ""


def _one_line(text: str, limit: int = 400) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[:limit]} …"
