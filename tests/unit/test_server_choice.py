"""Which server is tried next, and when a server that serves nothing is left."""

from __future__ import annotations

import itertools

import pytest

from bufstore.jetstream.server_choice import Server, ServerChoice, leaderless

_GIVEN = [Server(f"nats://user:geheim@{host}:4222") for host in "abc"]


def _names(choice: ServerChoice, now: float = 0.0) -> list[str]:
    """Return the hosts of a round."""
    return [server.url.rpartition("@")[2].removesuffix(":4222") for server in choice.round(now)]


def _told(choice: ServerChoice) -> list[Server]:
    """Return those of a late round that were told."""
    choice.round(0.0)
    return [server for server in choice.round(1000.0) if server not in choice.given]


def test_the_server_that_was_lost_comes_last() -> None:
    choice = ServerChoice(_GIVEN, 2)
    assert _names(choice) == ["a", "b", "c"]
    choice.connected(_GIVEN[1])
    assert _names(choice) == ["c", "a", "b"]
    assert _names(ServerChoice(_GIVEN[:1], 0)) == ["a"]


def test_servers_that_were_told_come_one_at_a_time_after_some_seconds() -> None:
    choice = ServerChoice(_GIVEN[:1], 0)
    choice.connected(_GIVEN[0], ["a:4222", "x:4222", "y:4222"])
    assert choice.single, "until one of those told has accepted us"
    assert [_names(choice, now) for now in (10, 11, 12.9)] == [["a"]] * 3, "a restart takes a moment"
    assert [_names(choice, now) for now in (13, 13, 19)] == [["a", "x"], ["a", "y"], ["a", "x"]]
    told = choice.round(20)[1]
    choice.connected(told)
    assert not choice.single
    choice.told(["x:4222", "z:4222"])  # what is news comes first
    assert _names(choice, 30) == ["a"]
    assert [_names(choice, 33) for _ in range(3)] == [["a", "z"], ["a", "x"], ["a", "y"]]


def test_a_server_that_was_left_comes_last_of_all() -> None:
    choice = ServerChoice(_GIVEN, 0)
    choice.connected(_GIVEN[0], ["x:4222"])
    assert choice.failed(0, 4)
    assert _names(choice, 4) == ["b", "c", "x", "a"]


def test_a_single_server_is_left_for_one_that_was_told_from_the_second_time_on() -> None:
    """Its address may stand for several nodes, and those told may be unreachable from here."""
    choice = ServerChoice(_GIVEN[:1], 0)
    choice.connected(_GIVEN[0], ["x:4222"])
    for now, names in ((10, ["a"]), (20, ["x", "a"])):
        assert choice.failed(now - 8, now - 8) is False
        assert choice.failed(now, now)
        assert _names(choice, now) == names
        choice.connected(_GIVEN[0])
        assert _names(choice, now) == ["a"], "when it is lost for another reason"
        choice.connected(_GIVEN[0])
    choice.wrote(50)
    assert choice.failed(51, 55)
    assert _names(choice, 55) == ["a"]


@pytest.mark.parametrize(
    ("by", "address", "url", "tls_name"),
    [
        ("nats://u:p@a:4222", "b:4223", "nats://u:p@b:4223", None),
        ("u:p@a", "10.0.0.1:4222", "u:p@10.0.0.1:4222", "a"),
        ("tls://a:4222", "[::1]:4222", "tls://[::1]:4222", "a"),
        ("tls://10.0.0.2:4222", "10.0.0.1:4222", "tls://10.0.0.1:4222", None),
        ("wss://t@a:443/nats", "b:443", "wss://t@b:443", None),
        ("nats://a:4222", "", None, None),
        ("nats://a:4222", "other@b:4222", None, None),
        ("nats://u:p@a:4222", "other@b:4222", None, None),
        ("nats://a:4222", "b:port", None, None),
    ],
)
def test_what_is_told_is_connected_to_like_who_told_it(
    by: str, address: str, url: str | None, tls_name: str | None
) -> None:
    choice = ServerChoice([Server(by)], 0)
    choice.connected(Server(by), [address])
    told = _told(choice)
    assert told == ([Server(url, tls_name)] if url is not None else [])
    assert "u:p" not in repr(choice)


def test_a_name_is_told_on() -> None:
    choice = ServerChoice([Server("tls://a:4222")], 0)
    choice.connected(Server("tls://a:4222"), ["10.0.0.1:4222"])
    choice.connected(_told(choice)[0], ["10.0.0.2:4222"])
    assert _told(choice)[0] == Server("tls://10.0.0.2:4222", "a")


def test_no_more_than_some_addresses_are_remembered() -> None:
    choice = ServerChoice(_GIVEN, 0)
    choice.connected(_GIVEN[0])
    for number in range(1000):
        choice.told([f"n{number}:4222"])
    told = [server.url.rpartition("@")[2] for server in (_told(choice)[0] for _ in range(100))]
    assert len(set(told)) == 32
    assert told[0] == "n999:4222"


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
        choice, left = ServerChoice(_GIVEN[:count], 0), list[float]()
        for event in happens.split(", "):
            words = event.split()
            now = float(words[-1])
            if words[-2] == "wrote":
                choice.wrote(now)
            elif words[-2] == "connected":
                choice.connected(_GIVEN[0])
            elif choice.failed(float(words[1]) if words[0] == "sent" else now, now):
                left.append(now)
        assert left == left_at


def test_a_cluster_without_leaders_is_gone_through_ever_more_slowly() -> None:
    choice, left = ServerChoice(_GIVEN, 0), list[float]()
    for now in range(600):
        if choice.failed(now, now):
            left.append(now)
            choice.connected(_GIVEN[len(left) % 3])
    pauses = [after - before for before, after in itertools.pairwise(left)]
    assert pauses == sorted(pauses)
    assert len(left) < 15


def test_what_says_that_nobody_leads() -> None:
    error = b'{"type":"io.nats.jetstream.api.v1.x","error":{"code":503,"err_code":%d,"description":"d"}}'
    assert leaderless(error % 10008)
    assert leaderless(error % 10009)
    assert not leaderless(error % 10077)
    assert not leaderless(b'{"stream":"S","seq":10008}')
