"""How many threads a step uses, by how the last steps fared.

PyTorch joins its threads hundreds of times a step. When another process holds one of the cores, every
join waits until the system gives that core back: SmolLM2 on two cores with two busy foreign processes
took 2.6 s a token with two threads and 0.11 s with one. Threads that sleep while they wait do not help
there; fewer threads do.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

WAITING = 0.55  # a main thread that computed for less of a step than this was waiting for the others
FREE = 0.7  # of a core that must have been idle for one more thread
SHORTEST, LONGEST = 0.5, 30.0  # seconds before more threads are tried again


@dataclass(slots=True)
class Pace:
    """Number of threads between 1 and ``most``. Values in, a number out; see ``Steps`` for the clocks."""

    most: int
    count: int = 0
    hold: float = SHORTEST  # seconds to wait before more are tried; doubles when they were too many
    _poor: int = 0
    _since: float = 0.0  # seconds at this number
    _idle: float = 0.0  # core seconds that nobody used meanwhile

    def __post_init__(self) -> None:
        self.count = self.count or self.most

    def observe(self, wall: float, main: float, idle: float) -> int:
        """Threads for the next step, after one that took ``wall`` seconds, of which the calling thread
        computed ``main``, while the machine's cores were idle for ``idle`` core seconds in all."""
        self._since += wall
        self._idle += idle
        if self.count > 1 and main < WAITING * wall:
            self._poor += 1
            # One very long wait tells enough; a short one may be chance.
            if self._poor >= 3 or wall - main > 0.2:
                self.hold = min(LONGEST, self.hold * 2) if self._since < self.hold + 4 else SHORTEST
                self._move(max(1, self.count // 2))
        else:
            self._poor = 0
            if self.count < self.most and self._since >= self.hold:
                more = min(self.most, self.count * 2)
                if self._idle >= FREE * (more - self.count) * self._since:
                    self._move(more)
                else:
                    self._since = self._idle = 0.0
        return self.count

    def _move(self, count: int) -> None:
        self.count, self._poor, self._since, self._idle = count, 0, 0.0, 0.0


class Steps:
    """Measures steps and sets PyTorch's threads: ``with steps:`` around each forward pass."""

    def __init__(self, most: int) -> None:
        self._pace = Pace(most)
        self._begun = (0.0, 0.0, 0.0)

    def __enter__(self) -> None:
        import torch

        # The number belongs to the process: another model may have changed it since.
        if torch.get_num_threads() != self._pace.count:
            torch.set_num_threads(self._pace.count)
        self._begun = self._now()

    def __exit__(self, *_: object) -> None:
        wall, main, idle = (after - before for after, before in zip(self._now(), self._begun, strict=True))
        self._pace.observe(wall, main, idle)

    def _now(self) -> tuple[float, float, float]:
        return time.perf_counter(), time.thread_time(), self._unused()

    def _unused(self) -> float:
        if self._pace.count == self._pace.most:
            return 0.0  # of interest only when there may be room for more
        import psutil

        return float(psutil.cpu_times().idle)
