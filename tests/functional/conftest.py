"""Settings of the property tests."""

from __future__ import annotations

from hypothesis import settings

# The first example pays for imports and a busy machine for anything: a deadline would fail at random.
settings.register_profile("functional", deadline=None, max_examples=50)
settings.load_profile("functional")
