"""ALFWorld: household tasks as text, played by a native simulator."""

from gigpo_lightning.envs.alfworld.env import AlfworldEnv
from gigpo_lightning.envs.alfworld.game import GameData, game_from_problem, load_game

__all__ = ["AlfworldEnv", "GameData", "game_from_problem", "load_game"]
