"""One thread for every test and its child processes: threads of tiny models only wait for each other."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; child processes inherit it
