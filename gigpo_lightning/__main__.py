"""`python -m gigpo_lightning`: hands the command line to its command. Loads nothing heavy: `--help` is quick."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from gigpo_lightning import __version__
from gigpo_lightning.cli_errors import fail, show_traceback
from gigpo_lightning.suggest import did_you_mean

# Commands of LightningCLI, with what they do.
TRAINER_COMMANDS = {
    "fit": "train, then evaluate on unseen tasks",
    "validate": "evaluate a checkpoint as it is done during training",
    "test": "evaluate a checkpoint on fixed tasks, by task type, and write results.json",
    "predict": "play episodes with a checkpoint and write readable transcripts",
}
# Other commands: what they do, and "module:function taking the rest of the command line".
TOOL_COMMANDS = {
    "check": ("prove the installation, part by part", "gigpo_lightning.cli_install_check:run_check"),
    "plan": ("say what a run needs in memory and time, before it is started", "gigpo_lightning.cli_plan:run_plan"),
    "compare": ("train variants with several seeds and compare them", "gigpo_lightning.compare.command:run_compare"),
    "export": ("write the adapter or the merged model of a checkpoint", "gigpo_lightning.cli_export:run_export"),
    "anchors": ("print the anchors that a run's library remembers", "gigpo_lightning.cli_anchors:run_anchors"),
}
# Commands of single worlds: command → (what it does, world → "module:function taking the rest of the command line").
WORLD_COMMANDS = {
    "check-env": (
        "compare the native engine with the stock one, step by step, on your game files",
        {"alfworld": "gigpo_lightning.envs.alfworld.check:run_check"},
    ),
    "make-games": (
        "write generated games in the layout of the real data",
        {"alfworld": "gigpo_lightning.envs.alfworld.files:run_make"},
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The command line without the program's name; by default the process's own.

    Returns:
        The exit code: 0, or what the command says. Bad input exits with 2 after one message.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if argv is None and not getattr(sys.flags, "safe_path", False) and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # the installed command finds a world of one's own, as `python -m` does
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if args[0] in ("-V", "--version", "version"):
        print(f"gigpo_lightning {__version__}")
        return 0
    command, rest = args[0], args[1:]
    if command in TRAINER_COMMANDS:
        from gigpo_lightning.cli import run

        run(command, rest)
        return 0
    if command in WORLD_COMMANDS:
        return _run_world_command(command, rest)
    if command in TOOL_COMMANDS:
        return _call(TOOL_COMMANDS[command][1], rest)
    fail(_unknown("command", command, [*TRAINER_COMMANDS, *TOOL_COMMANDS, *WORLD_COMMANDS]))


def usage() -> str:
    """The text of `--help`."""
    lines = ["usage: python -m gigpo_lightning COMMAND [options]", "", "commands:"]
    lines += [f"  {name:<12}{text}" for name, text in TRAINER_COMMANDS.items()]
    lines += [f"  {name:<12}{text}" for name, (text, _) in TOOL_COMMANDS.items()]
    lines += [f"  {name:<12}{text} ({', '.join(worlds)})" for name, (text, worlds) in WORLD_COMMANDS.items()]
    lines += [
        "",
        "examples:",
        "  python -m gigpo_lightning plan --config alfworld.yaml",
        "  python -m gigpo_lightning fit --config alfworld.yaml",
        "  python -m gigpo_lightning fit --config alfworld.yaml --ckpt_path last",
        "  python -m gigpo_lightning test --config alfworld.yaml --ckpt_path best",
        "",
        "A configuration is sought in the working folder, then among the shipped ones; several overlay in order.",
        "`COMMAND --help` describes a command's options, `COMMAND --print_config` shows what they come to.",
        "`--version` shows the version.",
        "With GIGPO_TRACEBACK=1 in the environment an error shows where in the code it was raised.",
    ]
    return "\n".join(lines)


def _run_world_command(command: str, args: list[str]) -> int:
    """Call the command's function; the world may be left out where there is only one."""
    worlds = WORLD_COMMANDS[command][1]
    named = bool(args) and not args[0].startswith("-")
    if not named and len(worlds) > 1:
        fail(f"{command}: name the world ({', '.join(worlds)})")
    world = args[0] if named else next(iter(worlds))
    if world not in worlds:
        fail(_unknown(f"{command}: world", world, list(worlds)))
    return _call(worlds[world], args[1:] if named else args)


def _call(target: str, args: list[str]) -> int:
    """Call the function of a `module:function`; bad input exits with 2 after one message."""
    module, function = target.split(":")
    try:
        return int(getattr(import_module(module), function)(args) or 0)
    except (ValueError, TypeError, OSError) as error:
        if show_traceback():
            raise
        fail(str(error))


def _unknown(what: str, given: str, known: list[str]) -> str:
    return f"{what} {given!r} is unknown{did_you_mean(given, known)} (there are: {', '.join(known)})"


if __name__ == "__main__":
    sys.exit(main())
