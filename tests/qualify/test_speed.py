"""What the speeds of several streams mean."""

from __future__ import annotations

import pytest

from turnout.qualify.speed import _Run


def test_tokens_count_for_the_span_in_which_all_streams_decode() -> None:
    """The first stream wrote nine tokens while the second still read its prompt: they are no part of the rate."""
    early = [(1.0, 1), *((1.0 + i, 1) for i in range(1, 10)), *((10.0 + i, 1) for i in range(1, 6))]
    late = [(10.0, 1), *((10.0 + i, 2) for i in range(1, 6))]
    run = _Run(15.0, [early, late])
    assert run.first_s == 10.0
    assert run.decode == pytest.approx((5 + 10) / 5)
    assert run.between_s == pytest.approx((14 / 14 + 5 / 10) / 2)


def test_streams_without_a_second_token_have_no_rate() -> None:
    assert _Run(2.0, [[(1.0, 1)]]).decode == _Run(2.0, []).decode == 0.0
    assert _Run(2.0, [[(1.0, 1)]]).between_s == 0.0
