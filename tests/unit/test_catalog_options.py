"""Options of a table in SQL's catalog, and servers that the environment names: which one wins, and who gets a login."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore import ConfigError
from bufstore.spark.catalog_options import check_same_columns, of_catalog, schema_of, with_kept
from bufstore.spark.connection_options import connection, named
from bufstore.spark.sink.bufstore_format import NAMES as SINK_NAMES
from bufstore.spark.source.log_columns import types_of
from bufstore.spark.source.options import NAMES as LOG_NAMES
from bufstore.spark.tables.table_options import NAMES as TABLE_NAMES

OPTIONS = ["nats", "natsUrl", "stream", "threads", "partitions", "startingPosition", "startingTimestamp", "columns"]
some = st.dictionaries(st.sampled_from(OPTIONS), st.text())
COLUMNS = types_of(["position", "stored_at", "messages", "body"])


@given(some, some)
def test_a_read_replaces_what_its_table_says(kept: dict[str, str], own: dict[str, str]) -> None:
    table = {name.lower(): value for name, value in kept.items()}
    found = with_kept(own, schema_of(COLUMNS, table))
    assert found.items() >= own.items()
    # Of two options for one thing, a read's own replaces the table's.
    both = {frozenset(pair) for pair in (("nats", "natsUrl"), ("threads", "partitions"))}
    for pair in (*both, frozenset(("startingPosition", "startingTimestamp"))):
        if pair & own.keys():
            assert {name for name in pair if name in found or name.lower() in found} == pair & own.keys()
    others = {name: value for name, value in table.items() if name in ("stream", "columns") and name not in own}
    assert found.items() >= others.items()


@given(some)
def test_a_table_without_options_of_ours_changes_nothing(own: dict[str, str]) -> None:
    schema = schema_of(COLUMNS, None)
    assert with_kept(own, schema) == own
    assert schema.simpleString() == "struct<position:bigint,stored_at:timestamp,messages:array<string>,body:binary>"


def test_what_a_catalog_keeps_are_options_and_no_other_properties() -> None:
    properties = {
        "provider": "threadlog",
        "owner": "me",
        "comment": "hi",
        "stream": "A",
        "option.stream": "A",
        "p": "1",
    }
    assert of_catalog(properties) == {"stream": "A"}
    assert of_catalog({"stream": "A"}) is None


@pytest.mark.parametrize(
    "options",
    [
        {"nats": "nats://me:hush@a"},
        {"natsUrl": "nats://a, nats://hush@b"},
        {"NATSURL": "tls://me:hush@a"},
        {"Password": "hush"},
        {"token": "hush"},
        {"tlsKeyFile": "-----BEGIN PRIVATE KEY-----\nhush\n-----END PRIVATE KEY-----\n"},
        {"credentialsFile": "-----BEGIN USER NKEY SEED-----\nhush\n------END USER NKEY SEED------\n"},
        {"postgres": "host=a password=hush"},
        {"postgresUrl": "postgresql://me:hush@a/b"},
        {"postgresUrl": "postgresql://a/b?password=hush"},
        {"postgresUrl": "postgresql://a/b?sslpassword=hush"},
    ],
)
def test_a_login_does_not_get_into_a_catalog(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="contains a login, which everybody who can read") as refused:
        of_catalog({"provider": "x"} | {f"option.{name}": value for name, value in options.items()})
    assert "hush" not in str(refused.value)


def test_what_is_no_login_does() -> None:
    kept = {
        "natsurl": "tls://a:4222",
        "postgresurl": "postgresql://app@b/db",
        "user": "app",
        "credentialsfile": "/etc/app.creds",
        "tlscertificatefile": "/etc/app.pem",
        "tlskeyfile": "/etc/app.key",
    }
    assert of_catalog({"provider": "x"} | {f"option.{name}": value for name, value in kept.items()}) == kept


def test_a_table_with_columns_of_somebody_elses_is_refused() -> None:
    schema = schema_of(COLUMNS, {})
    check_same_columns(tuple(COLUMNS), schema)
    with pytest.raises(ConfigError, match="option columns"):
        check_same_columns(["position"], schema)


def test_servers_that_nobody_names_are_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in {"": "nats://a", "_CREDS": "/a.creds", "_USER": "me", "_PASSWORD": "hush"}.items():
        monkeypatch.setenv(f"BUFSTORE_NATS{variable}", value)
    monkeypatch.setenv("BUFSTORE_POSTGRES", "postgresql://me:hush@b/db")
    login = {"credentialsFile": "/a.creds", "user": "me", "password": "hush"}
    assert named({"stream": "A"}, LOG_NAMES) == {"stream": "A", "natsUrl": "nats://a"} | login
    assert named({}, TABLE_NAMES)["postgresUrl"] == "postgresql://me:hush@b/db"
    assert named({}, SINK_NAMES)["postgresUrl"] == "postgresql://me:hush@b/db"
    # A login is not given to a server that was named elsewhere.
    elsewhere = {"nats": "nats://elsewhere", "postgres": "host=elsewhere"}
    assert named(elsewhere, TABLE_NAMES) == elsewhere


def test_files_for_tls_are_the_environments_with_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("TLS_CA", "TLS_CERT", "TLS_KEY", "NATS"):
        monkeypatch.setenv(f"BUFSTORE_{variable}", f"/{variable}")
    certificate = {"tlsCertificateFile": "/TLS_CERT", "tlsKeyFile": "/TLS_KEY"}
    theirs = {"natsUrl": "/NATS", "tlsCaFile": "/TLS_CA"}
    assert named({}, LOG_NAMES) == theirs | certificate
    # A key is that of one certificate.
    assert named({"tlsCertificateFile": "/our.pem"}, LOG_NAMES) == theirs | {"tlsCertificateFile": "/our.pem"}
    assert named({"tlsCaFile": "/our-ca.pem"}, LOG_NAMES) == theirs | certificate | {"tlsCaFile": "/our-ca.pem"}
    assert named({"nats": "tls://elsewhere"}, LOG_NAMES) == {"nats": "tls://elsewhere"}
    # One that is set to nothing names no file, as for the command line.
    monkeypatch.setenv("BUFSTORE_TLS_CA", "")
    assert named({}, LOG_NAMES) == {"natsUrl": "/NATS"} | certificate


@pytest.mark.parametrize(
    ("given", "environment"),
    [
        ({"credentialsFile": "/a.creds"}, {}),
        ({"token": "hush"}, {}),
        ({"user": "app"}, {"password": "hush"}),
        ({"user": "app", "password": "mine"}, {}),
    ],
)
def test_another_way_to_sign_in_replaces_that_of_the_environment(
    given: dict[str, str], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a table with a credentialsFile could not be read where the environment had a user and password."""
    for variable, value in {"": "nats://a", "_USER": "me", "_PASSWORD": "hush"}.items():
        monkeypatch.setenv(f"BUFSTORE_NATS{variable}", value)
    found = named(given, LOG_NAMES)
    assert found == {"natsUrl": "nats://a"} | given | environment
    connection(found)
