"""The number of threads follows what steps cost; no clock is read here."""

from __future__ import annotations

from turnout.backends.torch_native_threads import LONGEST, Pace


def test_quiet_cores_keep_all_threads() -> None:
    pace = Pace(2)
    assert all(pace.observe(0.1, 0.09, 0.0) == 2 for _ in range(100))


def test_one_long_wait_or_three_short_ones_are_enough() -> None:
    assert Pace(2).observe(2.6, 0.1, 0.0) == 1
    pace = Pace(8)
    assert [pace.observe(0.1, 0.02, 0.0) for _ in range(3)] == [8, 8, 4]
    pace = Pace(2)
    poor, good = (0.1, 0.02, 0.0), (0.1, 0.09, 0.0)
    assert [pace.observe(*values) for values in (poor, poor, good, poor, poor)] == [2] * 5


def test_more_threads_come_back_when_a_core_was_idle() -> None:
    pace = Pace(2)
    pace.observe(2.6, 0.1, 0.0)
    assert all(pace.observe(0.1, 0.1, 0.0) == 1 for _ in range(100))  # the other core is busy all the time
    counts = [pace.observe(0.1, 0.1, 0.09) for _ in range(12)]
    assert counts[0] == 1 and counts[-1] == 2


def test_a_core_that_never_stays_free_is_tried_ever_more_rarely() -> None:
    """Between two steps the foreign process looks idle, but with two threads every step waits."""
    pace, tried, spent = Pace(2), 0, 0.0
    while spent < 300:
        alone = pace.count == 1
        wall, main = (0.1, 0.1) if alone else (1.0, 0.1)
        tried += not alone
        pace.observe(wall, main, 0.1 if alone else 0.0)
        spent += wall
    assert tried < 20
    assert pace.hold == LONGEST
