"""Reads the golden cases of GiGPO: from tests/golden, or from the folder that GIGPO_GOLDEN names."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Case = dict[str, Any]


def load_cases() -> list[Case]:
    root = Path(os.environ.get("GIGPO_GOLDEN") or Path(__file__).parents[1] / "golden")
    folder = root / "gigpo" if (root / "gigpo").is_dir() else root
    cases: list[Case] = []
    for path in sorted(folder.glob("*.json")):
        if path.name != "index.json":
            content = json.loads(path.read_text(encoding="utf-8"))
            cases += content if isinstance(content, list) else [content]
    if not cases:
        raise FileNotFoundError(f"no golden case in {folder}")
    return cases


def column(case: Case, field: str) -> Tensor:
    return torch.tensor([record[field] for record in case["records"]], dtype=torch.float64)


def numbered(case: Case, *fields: str) -> Tensor:
    """Integer ids of the records: equal where the fields are equal."""
    table: dict[tuple[Any, ...], int] = {}
    keys = [tuple(record[field] for field in fields) for record in case["records"]]
    return torch.tensor([table.setdefault(key, len(table)) for key in keys])
