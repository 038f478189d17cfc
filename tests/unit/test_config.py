"""Settings of the wrong type are refused when they are made, not by the first write or flush."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import fields
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest

from bufstore import BufferConfig, ConfigError, InvalidId, LogConfig, NatsConfig, PostgresThreadStore
from bufstore.config import LANES_MAX, as_nats_config, split_url
from bufstore.jetstream.buckets import placed, storage
from bufstore.jetstream.connection import Connection
from bufstore.mailbox import MailboxConfig, NatsMailboxNames
from bufstore.spark.config import Deployment, SinkConfig
from bufstore.spark.connection_options import connection, named
from bufstore.tokens import Storage, TokensConfig

DEPLOYMENT = {"nats": "h", "postgres": "dbname=x"}
SINK = DEPLOYMENT | {"app_id": "a"}
CONFIGS: list[tuple[type[Any], dict[str, Any]]] = [
    (LogConfig, {}),
    (BufferConfig, {}),
    (MailboxConfig, {}),
    (NatsMailboxNames, {}),
    (TokensConfig, {}),
    (SinkConfig, SINK),
]


@pytest.mark.parametrize(
    ("kind", "needed", "name"),
    [(kind, needed, f.name) for kind, needed in CONFIGS for f in fields(kind) if str(f.type).startswith("int")],
)
def test_a_number_that_must_be_whole_is(kind: type[Any], needed: dict[str, Any], name: str) -> None:
    default = getattr(kind, name, None)
    for wrong in (float(default or 8), 8.5, True, "8"):
        with pytest.raises(ConfigError, match=rf"{kind.__name__}\.{name} must be a whole number"):
            kind(**needed | {name: wrong})
    kind(**needed | {name: default})
    assert BufferConfig(lease_s=4.5).lease_s == 4.5, "a time may be any"


@pytest.mark.parametrize(
    ("kind", "name", "taken", "refused"),
    [
        (LogConfig, "partitions", [1, 256], [0, 257]),
        (LogConfig, "lanes", [1, LANES_MAX], [0, LANES_MAX + 1]),
        (LogConfig, "lane", [0], [-1, 1]),
        (LogConfig, "replicas", [1, 5], [0, 6]),
        (LogConfig, "max_bytes", [1 << 20], [(1 << 20) - 1]),
        (LogConfig, "max_entry_bytes", [1 << 10, 512 << 20], [(1 << 10) - 1, (512 << 20) + 1]),
        (BufferConfig, "lease_s", [3, 8], [2.9, 8.1]),
        (BufferConfig, "outage_reserve", [0.01, 0.99], [0, 1]),
        (BufferConfig, "retain_after_flush_s", [60], [59.9]),
        (MailboxConfig, "lease_s", [0.001], [0.0009]),
        (MailboxConfig, "payload_max", [1, 512 << 10], [0, (512 << 10) + 1]),
        (MailboxConfig, "sweep_limit", [1, (1 << 31) - 1], [0, 1 << 31]),
        (NatsMailboxNames, "replicas", [1, 5], [0, 6]),
        (NatsMailboxNames, "max_bytes", [-1, 1], [-2, 0]),
        (NatsMailboxNames, "signals_pending_max", [1], [0]),
        (TokensConfig, "replicas", [1, 5], [0, 6]),
        (TokensConfig, "ttl_s", [1, 24 * 3600], [0, 24 * 3600 + 1]),
        (TokensConfig, "waiting_max", [1, 1_000_000], [0, 1_000_001]),
    ],
)
def test_a_number_has_its_bounds(kind: type[Any], name: str, taken: list[float], refused: list[float]) -> None:
    for value in taken:
        assert getattr(kind(**{name: value}), name) == value
    for value in refused:
        with pytest.raises(ConfigError, match=name):
            kind(**{name: value})


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"servers": []}, "servers is empty"),
        ({"token": "t", "user": "u", "password": "p"}, "choose only one of user, token"),
        ({"user": "u"}, "user and password go together"),
        ({"domain": "a b"}, "domain must be subject tokens"),
        ({"api_prefix": "a.*"}, "api_prefix must be subject tokens"),
    ],
)
def test_settings_of_nats_that_cannot_work_are_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        NatsConfig(**wrong)


@pytest.mark.parametrize(
    ("kind", "needed", "name"),
    [
        (kind, needed, f.name)
        for kind, needed in [*CONFIGS, (NatsConfig, {})]
        for f in fields(kind)
        if str(f.type).startswith(("float", "bool"))
    ],
)
def test_a_time_is_a_number_and_a_flag_a_bool(kind: type[Any], needed: dict[str, Any], name: str) -> None:
    """Regression: with a time out of an environment variable, flushing stopped for good, and nothing said so. A time
    that no float can be was taken, and OverflowError came at its first use.
    """
    flag = isinstance(getattr(kind, name), bool)
    for wrong in ("1", b"1", [1], 1 if flag else True):
        with pytest.raises(ConfigError, match=rf"{kind.__name__}\.{name} must be (a number|True or False), not "):
            kind(**needed | {name: wrong})
    for wrong in (float("nan"), 10**400):
        with pytest.raises(ConfigError, match=name):
            kind(**needed | {name: wrong})


@pytest.mark.parametrize(
    ("kind", "needed", "name"),
    [
        (kind, needed, f.name)
        for kind, needed in [*CONFIGS, (NatsConfig, {}), (Storage, {}), (Deployment, DEPLOYMENT)]
        for f in fields(kind)
    ],
)
def test_a_field_of_a_wrong_type_is_named(kind: type[Any], needed: dict[str, Any], name: str) -> None:
    """Regression: a bare TypeError or AttributeError, or an error of the first connection that named no field."""
    for wrong in (object(), b"x", [object()]):
        with pytest.raises((ConfigError, InvalidId), match=f"(?i){name}"):
            kind(**needed | {name: wrong})


def test_a_store_whose_schema_or_pool_size_is_of_a_wrong_type_is_refused() -> None:
    """Regression: a bare TypeError."""
    wrong: Any
    for wrong in (None, 5, b"bufstore"):
        with pytest.raises(ConfigError, match="schema must be a str, not "):
            PostgresThreadStore("", schema=wrong)
    for wrong in ("8", 8.0, True):
        with pytest.raises(ConfigError, match="the size of a pool must be a whole number"):
            PostgresThreadStore("", pool_size=wrong)
    PostgresThreadStore("", pool_size=IntEnum("Size", ["ONE"])(1))


@pytest.mark.parametrize("kind", [LogConfig, NatsMailboxNames])
def test_one_tag_is_a_tag(kind: type[Any]) -> None:
    assert kind(placement_tags="ssd").placement_tags == ("ssd",)


@pytest.mark.parametrize("tags", [(), ("ssd", "eu")])
@pytest.mark.parametrize("cluster", [None, "east"])
def test_where_a_stream_is_kept_is_read_back(tags: tuple[str, ...], cluster: str | None) -> None:
    """The command line and jobs open a log with what the server says: with less they would find that it drifted."""
    config = LogConfig(replicas=3, placement_tags=tags, placement_cluster=cluster)
    assert LogConfig(**placed(storage(config))) == config
    wanted = {name: value for name, value in (("cluster", cluster), ("tags", [*tags])) if value}
    assert storage(config).get("placement", {}) == wanted


def test_a_buckets_keys_go_beside_the_api_of_a_domain() -> None:
    hub, other, plain = NatsConfig(domain="hub"), NatsConfig(api_prefix="$JS.other.API"), NatsConfig()
    assert hub.published_on("$KV.b.run.x") == "$JS.hub.API.$KV.b.run.x"
    assert hub.published_on(hub.published_on("$KV.b.run.x")) == hub.published_on("$KV.b.run.x")
    for config in (hub, other, plain):
        assert config.published_on("thread.groups") == "thread.groups"
    for config in (other, plain):
        assert config.published_on("$KV.b.run.x") == "$KV.b.run.x"


def test_a_domain_may_end_with_a_dot_as_a_prefix_may() -> None:
    """Regression: nobody answered on "$JS.hub..API", and the log was called unavailable."""
    assert NatsConfig(domain="hub.").api == NatsConfig(api_prefix="$JS.hub.API.").api == "$JS.hub.API"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("nats://u:p@a:4222,nats://u:p@b:4222", [("a", "u", "p"), ("b", "u", "p")]),
        (" tls://u:p@a:4222 ,\tnats://b:4222,, ", [("a", "u", "p"), ("b", None, None)]),
        ("a:4222,b:4222", [("a", None, None), ("b", None, None)]),
        ("nats://u:p@a:4222,b:4222", [("a", "u", "p"), ("b", None, None)]),
        ("nats://u:p%2Cnats%3A%2F%2Fq%40c@a:4222,nats://t@b:4222", [("a", "u", "p,nats://q@c"), ("b", "t", None)]),
        # One password, of which nothing was escaped that must be.
        ("nats://u:x1,p@a:4222", [("a", "u", "x1,p")]),
        ("nats://u:p@q@a:4222", [("a", "u", "p@q")]),
    ],
)
def test_one_text_may_hold_several_nats_urls(
    text: str, found: list[tuple[str, str | None, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: an app's text was read as one URL, of the last server alone, and an environment's as several."""
    config = as_nats_config(text)
    for servers in (config.servers, NatsConfig(servers=[text]).servers):
        split = [split_url(url) for url in servers]
        assert [(bare.partition("://")[2] or bare, *login) for bare, *login in split] == [
            (f"{host}:4222", *login) for host, *login in found
        ]
    monkeypatch.setenv("BUFSTORE_NATS", text)
    assert connection(named({}, {})).servers == config.servers


@pytest.mark.parametrize(
    "text",
    [
        *("nats://u:p@a:4222,u:p@b:4222", "u:p@a,u:p@b", "nats://u:p@q,r@a:4222"),
        *("nats://a:4222,u:p@b:4222", "a:4222,u:p@b:4222", "a:4222,t@b:4222", "nats://a,u:p@b", "nats://u:1,p@a:4222"),
    ],
)
def test_a_text_that_may_be_one_nats_url_or_several_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"write the scheme \(nats://\) of each, and in a password %2C") as refused:
        as_nats_config(text)
    assert "u:p" not in str(refused.value)


@pytest.mark.parametrize("url", ["NATS://u:p@h:4222", " nats://u:p@h:4222\n", "Tls://u:p@h:4222"])
def test_a_nats_url_is_read_whatever_the_case_of_its_scheme_and_with_space_around_it(url: str) -> None:
    """Regression: the user was `NATS`, or ` nats`, and the password `//u:p`."""
    (read,) = NatsConfig(servers=url).servers
    assert read == url.strip().replace("NATS", "nats").replace("Tls", "tls"), "the client looks for tls:// in it"
    assert split_url(read)[1:] == split_url(url.strip())[1:] == ("u", "p")


@pytest.mark.parametrize("url", ["http://u:p@h:4222", "nat://u:p@h:4222"])
def test_another_scheme_is_no_user_of_nats(url: str) -> None:
    with pytest.raises(ConfigError, match="cannot read a NATS URL"):
        NatsConfig(servers=url)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"user": "u", "password": b"s3cr3t"}, "password must be a str, not bytes"),
        ({"user": 5, "password": "p"}, "user must be a str, not int"),
        ({"token": 123}, "token must be a str, not int"),
        ({"credentials": b"s3cr3t"}, "credentials must be a str or a Path, not bytes"),
        ({"domain": 5}, "domain must be a str, not int"),
    ],
)
def test_a_login_that_is_no_text_is_refused_and_not_shown(wrong: dict[str, Any], name: str) -> None:
    """Regression: the first connection failed with a TypeError, or the server refused another login than was meant."""
    with pytest.raises(ConfigError, match=rf"NatsConfig\.{name}$"):
        NatsConfig(**wrong)
    assert NatsConfig(credentials=Path("a.creds")).credentials == Path("a.creds")


def test_a_mapping_names_fields_of_a_nats_config() -> None:
    """Regression: a mistyped field was a TypeError."""
    assert as_nats_config({"servers": "nats://h", "user": "u", "password": "p"}).user == "u"
    wrong: Any
    for wrong in ("servrs", 5):
        with pytest.raises(ConfigError, match=f"NatsConfig has no {wrong}"):
            as_nats_config({wrong: "nats://h"})


@pytest.mark.parametrize("scheme", ["ws", "wss"])
def test_a_websocket_without_its_library_is_a_config_error(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)

    async def main() -> None:
        connection = Connection(NatsConfig(servers=f"{scheme}://127.0.0.1:1", connect_timeout_s=1), "test")
        with pytest.raises(ConfigError, match="aiohttp"):
            await connection.open()
        await connection.aclose()

    asyncio.run(main())
