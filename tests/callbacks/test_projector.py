"""The library in TensorBoard's embedding projector: what is written, read back by TensorBoard's own code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.projector.projector_plugin import ProjectorPlugin
from werkzeug.test import Client

from gigpo_lightning.callbacks.anchor_library import AnchorLibrary
from gigpo_lightning.callbacks.anchor_table import AnchorTable
from gigpo_lightning.callbacks.checkpoint import IterationCheckpoint
from gigpo_lightning.callbacks.projector import metadata, most_visited
from gigpo_lightning.policy.embedding import observation_embeddings
from tests.toy_run import fit, weights


def written(root: Path, epochs: int, ckpt_path: str | None = None, **options: Any) -> tuple[AnchorLibrary, Any]:
    library = AnchorLibrary(projector_every=2, **options)
    logger = TensorBoardLogger(root, name="", version="board")
    _, module, _ = fit(root, epochs, [library, IterationCheckpoint()], ckpt_path=ckpt_path, logger=logger)
    return library, module


def ask(plugin: ProjectorPlugin, route: str, **query: str) -> bytes:
    """What TensorBoard's browser page would get."""
    answer = Client(plugin.get_plugin_apps()[route]).get(route, query_string=query)
    assert answer.status_code == 200, answer.data
    return answer.data


def plugin_of(folder: Path) -> ProjectorPlugin:
    multiplexer = EventMultiplexer({".": str(folder)})
    multiplexer.Reload()
    return ProjectorPlugin(TBContext(logdir=str(folder), multiplexer=multiplexer))


def test_tensorboard_loads_what_is_written(tmp_path: Path) -> None:
    library, module = written(tmp_path, 2, projector_anchors=5)
    plugin = plugin_of(tmp_path / "board")
    assert json.loads(ask(plugin, "/runs")) == ["."]
    info = json.loads(ask(plugin, "/info", run="."))
    (entry,) = info["embeddings"]
    name = entry["tensorName"]
    assert name == "anchors:00002"
    lines = [line.split("\t") for line in ask(plugin, "/metadata", run=".", name=name).decode().splitlines()]
    assert lines[0] == ["text", "visits", "mean return", "stage"]
    table = library.table
    rows = np.argsort(-table.visits, kind="stable")[:5]
    assert lines[1:] == [
        [table.texts[row], str(table.visits[row]), f"{table.mean[row]:.4f}", table.stages[row]] for row in rows
    ]
    raw = np.frombuffer(ask(plugin, "/tensor", run=".", name=name), np.float32).reshape(5, -1)
    texts = [table.texts[row] for row in rows]
    vectors = observation_embeddings(module.policy.eval(), texts, 100).detach().numpy()
    np.testing.assert_allclose(raw, vectors, rtol=1e-5, atol=1e-6)


def test_every_so_many_iterations_and_a_resumed_run_keeps_the_earlier_views(tmp_path: Path) -> None:
    written(tmp_path, 3)
    assert sorted(path.parent.parent.name for path in (tmp_path / "board").rglob("tensors.tsv")) == ["00002"]
    written(tmp_path, 6, ckpt_path="last")
    info = json.loads(ask(plugin_of(tmp_path / "board"), "/info", run="."))
    assert [entry["tensorName"] for entry in info["embeddings"]] == [f"anchors:0000{n}" for n in (2, 4, 6)]


def test_off_by_default_and_without_a_board_it_says_so(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="", version="board")
    fit(tmp_path, 2, [AnchorLibrary()], logger=logger)
    assert not list(tmp_path.rglob("*.tsv"))
    with pytest.warns(UserWarning, match="projector_every has no TensorBoardLogger"):
        fit(tmp_path, 2, [AnchorLibrary(projector_every=2)])


def test_the_training_is_the_same_with_and_without(tmp_path: Path) -> None:
    found = [weights(fit(tmp_path / str(every), 3, [AnchorLibrary(projector_every=every)])[1]) for every in (None, 1)]
    assert found[0].equal(found[1])


def test_rows_and_lines() -> None:
    table = AnchorTable.of_turns(
        ["a", "b", "b", "c", "d"], [1.0, 0.5, 0.25, 3.0, 0.0], ["x\ty\nz", "b", "b", " ", "d"], ["s"] * 5, 0, 80
    )
    assert most_visited(table, 2).tolist() == [1, 0]  # c has no text
    assert most_visited(table, 9).tolist() == [1, 0, 3]
    assert metadata(table, np.array([0, 1])) == [["x y z", "1", "1.0000", "s"], ["b", "2", "0.3750", "s"]]
    table.forget_statistics()
    assert most_visited(table, 9).tolist() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"projector_every": 0}, "AnchorLibrary.projector_every=0: must be ≥ 1, or null"),
        ({"projector_anchors": 0}, "AnchorLibrary.projector_anchors=0: must be ≥ 1"),
        ({"scope": "house"}, "AnchorLibrary.scope='house': must be one of task, world, text"),
    ],
)
def test_a_bad_option_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AnchorLibrary(**options)
