"""Options of ``format("threadlog")``: refused where they make no sense, and without secrets."""

from __future__ import annotations

import pytest

from bufstore import ConfigError
from bufstore.spark.source.options import read_options


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"nats": "nats://h:0"},
        {"surprise": "1"},
        {"form": "rows"},
        {"columns": "nothing"},
        {"form": "messages", "columns": "kind"},
        {"startingPosition": "soon"},
        {"endingPosition": "earliest"},
        {"startingPosition": "1", "startingTimestamp": "2026-01-01T00:00:00Z"},
        {"startingTimestamp": "2026-01-01"},
        {"startingTimestamp": "yesterday"},
        {"maxMessagesPerTrigger": "0"},
        {"numPartitions": "-1"},
        {"failOnDataLoss": "perhaps"},
        {"threads": "a,b"},
        {"threads": "[]"},
        {"threads": '["a"]', "partitions": "1"},
        {"partitions": "x"},
        {"form": "messages", "threads": '["a"]'},
        {"form": "messages", "partitions": "1"},
        {"stream": "a.b"},
        {"user": "me"},
    ],
)
def test_an_option_that_makes_no_sense_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        read_options(given if "nats" in given or not given else {"nats": "nats://h:4222"} | given)


def test_options_of_any_case_and_no_secret_in_sight() -> None:
    found = read_options(
        {
            "NATS": "nats://me:hush@a:4222, nats://b:4222",
            "startingtimestamp": "1970-01-01T00:00:01.5+00:00",
            "maxbytespertrigger": "9",
            "PATH": "",
        }
    )
    assert (len(found.nats.servers), found.starting_timestamp_ns, found.max_bytes) == (2, 1_500_000_000, 9)
    assert "hush" not in repr(found)
