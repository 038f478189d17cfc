"""A message that is larger than a pull may deliver is asked for alone, and no other message is."""

from __future__ import annotations

import pytest

from bufstore.nats.pull_sizes import PullSizes

USUAL, ALONE = {"batch": 9, "max_bytes": 100}, {"batch": 1}


@pytest.mark.parametrize(
    ("ends", "then"),
    [
        ([], [USUAL, USUAL]),
        ([0], [ALONE, USUAL]),  # the first message is too large
        ([3], [USUAL]),  # the pull delivered all that it may
        ([3, 3], [ALONE, USUAL]),
        ([3, 5], [USUAL]),
        ([3, 3, 4], [USUAL]),  # another pull delivered the message
    ],
)
def test_a_message_too_large_for_a_pull_is_asked_for_alone(ends: list[int], then: list[dict[str, int]]) -> None:
    sizes = PullSizes(100)
    for came in ends:
        sizes.ended(came)
    assert [sizes.next(9) for _ in then] == then


def test_no_pull_asks_for_more_messages_than_the_server_allows() -> None:
    sizes = PullSizes(100, batch_max=4)
    assert [sizes.next(batch)["batch"] for batch in (9, 3)] == [4, 3]
