"""One thread for every test and what it starts: models here are tiny, and threads that wait for each other only cost."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; child processes inherit it
