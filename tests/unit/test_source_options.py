"""Options of ``format("threadlog")``: refused where they make no sense, and without secrets."""

from __future__ import annotations

import math
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore import ConfigError, NatsConfig, TlsFiles
from bufstore.config import split_url
from bufstore.spark.connection_options import connection, connection_options
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
        {"natsUrl": "nats://h:4222"},
        {"nats": "nats://me:hush@h:4222"},
        {"nats": "nats://h:4222,nats://token@i:4222"},
        {"connectTimeout": "soon"},
        {"domain": "a", "apiPrefix": "b"},
        {"minPartitions": "0"},
        {"maxTriggerDelay": "late"},
        {"minMessagesPerTrigger": "-1"},
        {"outageTimeout": "an hour"},
        {"outageTimeout": "nan"},
        {"outageTimeout": "-1"},
        {"startingPosition": "9" * 5000},
        {"numPartitions": str(2**63)},
    ],
)
def test_an_option_that_makes_no_sense_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as e:
        read_options(given if "nats" in given or not given else {"nats": "nats://h:4222"} | given)
    assert "hush" not in str(e.value)


def test_options_of_any_case_and_no_secret_in_sight() -> None:
    found = read_options(
        {
            "NATSURL": "nats://me:hush@a:4222, nats://b:4222",
            "startingtimestamp": "1970-01-01T00:00:01.5+00:00",
            "maxbytespertrigger": "9",
            "PATH": "",
        }
    )
    assert (len(found.nats.servers), found.starting_timestamp_us, found.max_bytes) == (2, 1_500_000, 9)
    assert "hush" not in repr(found)


def test_names_and_times_as_those_of_kafkas_source() -> None:
    found = read_options(
        {"nats": "nats://a:4222", "maxOffsetsPerTrigger": "9", "minoffsetspertrigger": "4", "maxTriggerDelay": "2m"}
    )
    assert (found.max_messages, found.min_messages, found.max_trigger_delay_s) == (9, 4, 120)
    assert read_options({"nats": "nats://a:4222", "maxTriggerDelay": "9" * 5000 + "d"}).max_trigger_delay_s == math.inf


WORD = st.text("abc,@:%/é", min_size=1)


@given(
    logins=st.lists(st.tuples(WORD, WORD), min_size=1, max_size=3),
    signed_in=st.sampled_from([{}, {"user": "me", "password": "hush"}, {"token": "hush"}, {"credentials": "/a.creds"}]),
    api=st.sampled_from([{}, {"domain": "hub"}, {"api_prefix": "$JS.other.API"}]),
    more=st.sampled_from(
        [
            {},
            {"tls_hostname": "nats.example", "connect_timeout_s": 1.5},
            {"tls": TlsFiles(ca="/ca.pem")},
            {"tls": TlsFiles(ca="/ca.pem", certificate="/our.pem", key="/our.key"), "tls_hostname": "nats.example"},
        ]
    ),
)
def test_a_job_reaches_nats_as_its_deployment_does(
    logins: list[tuple[str, str]], signed_in: dict[str, str], api: dict[str, str], more: dict[str, Any]
) -> None:
    urls = [f"nats://{quote(user, safe='')}:{quote(word, safe='')}@h{n}:4222" for n, (user, word) in enumerate(logins)]
    config = NatsConfig(servers=tuple(urls), **signed_in, **api, **more)
    assert connection(connection_options(config)) == config
    raw = NatsConfig(servers=("nats://me:a,b@h:4222",))  # a comma that is not escaped
    (url,) = connection(connection_options(raw)).servers
    assert split_url(url) == split_url(raw.servers[0])
