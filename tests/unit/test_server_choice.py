"""Which server is tried next, and when a server that serves nothing is left."""

from __future__ import annotations

import itertools

import pytest

from bufstore.jetstream.server_choice import ServerChoice, leaderless


def test_the_server_that_was_lost_comes_last() -> None:
    choice = ServerChoice(3, 2)
    assert choice.order() == [0, 1, 2]
    choice.connected(1)
    assert choice.order() == [2, 0, 1]
    assert ServerChoice(1, 0).order() == [0]


@pytest.mark.parametrize(
    ("happens", "left_at"),
    [
        ("fails 0, fails 1, fails 2.9", []),
        ("fails 0, fails 2.9, fails 3", [3]),
        ("fails 0, wrote 2, fails 3, fails 4", []),  # it serves after all
        ("fails 0, wrote 2, fails 3, fails 6", [6]),
        ("fails 0, fails 11", []),  # too long ago
        ("sent 0 fails 5", [5]),  # no answer in time
        ("wrote 1, sent 0 fails 5", []),  # sent before it served
        ("fails 0, fails 3, connected 3, fails 4, fails 8, fails 10", [3, 10]),  # the next one gets twice the time
        ("fails 0, fails 3, connected 3, wrote 4, fails 5, fails 8", [3, 8]),
        ("fails 0, fails 3, connected 3, fails 500, fails 504, fails 506", [3, 506]),
        ("fails 0, fails 3, connected 3, fails 604, fails 607", [3, 607]),  # forgotten after ten minutes
    ],
)
def test_a_server_that_serves_nothing_for_some_time_is_left(happens: str, left_at: list[float]) -> None:
    for count in (3, 1):  # one address may stand for several nodes
        choice, left = ServerChoice(count, 0), list[float]()
        for event in happens.split(", "):
            words = event.split()
            now = float(words[-1])
            if words[-2] == "wrote":
                choice.wrote(now)
            elif words[-2] == "connected":
                choice.connected(1)
            elif choice.failed(float(words[1]) if words[0] == "sent" else now, now):
                left.append(now)
        assert left == left_at


def test_a_cluster_without_leaders_is_gone_through_ever_more_slowly() -> None:
    choice, left = ServerChoice(3, 0), list[float]()
    for now in range(600):
        if choice.failed(now, now):
            left.append(now)
            choice.connected(len(left) % 3)
    pauses = [after - before for before, after in itertools.pairwise(left)]
    assert pauses == sorted(pauses)
    assert len(left) < 15


def test_what_says_that_nobody_leads() -> None:
    error = b'{"type":"io.nats.jetstream.api.v1.x","error":{"code":503,"err_code":%d,"description":"d"}}'
    assert leaderless(error % 10008)
    assert leaderless(error % 10009)
    assert not leaderless(error % 10077)
    assert not leaderless(b'{"stream":"S","seq":10008}')
