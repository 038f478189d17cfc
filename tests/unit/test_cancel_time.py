"""How long a statement whose time is over may take to be cancelled."""

from __future__ import annotations

import pytest

from bufstore.postgres.connection.alarm import cancel_time_s


@pytest.mark.parametrize("connected_in_s", [0.2, 0.3, 0.6, 0.7])
def test_a_cancel_request_has_more_time_than_the_connection_took(connected_in_s: float) -> None:
    """Regression: without a password it makes as many round trips, and lost that race on a link a little slower."""
    assert cancel_time_s(connected_in_s) >= 1.3 * connected_in_s


def test_a_server_that_hangs_is_not_waited_for_long() -> None:
    assert [cancel_time_s(connected_in_s) for connected_in_s in (0.0, 1.0, 60.0)] == [0.25, 1.0, 1.0]
