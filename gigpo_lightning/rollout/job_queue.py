"""A queue that draws what it gives out only when it is asked for it. Knows nothing of what it holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Generic, TypeVar

Job = TypeVar("Job")


class JobQueue(Generic[Job]):
    """Jobs with their numbers, in order; one that comes back is the next.

    Args:
        jobs: Drawn from no further than `ready` must know.
    """

    def __init__(self, jobs: Iterable[Job]):
        self._jobs = enumerate(jobs)
        self._drawn: deque[tuple[int, Job]] = deque()

    def ready(self, count: int) -> int:
        """How many jobs there are, at most `count`."""
        self._drawn.extend(islice(self._jobs, max(0, count - len(self._drawn))))
        return min(count, len(self._drawn))

    def take(self) -> tuple[int, Job]:
        """The next job and its number; `ready` has said that there is one."""
        return self._drawn.popleft()

    def put_back(self, number: int, job: Job) -> None:
        """Give a job back, to be the next."""
        self._drawn.appendleft((number, job))
