"""Connection strings of Postgres: what is wrong with one is said, and nothing secret in it is shown."""

from __future__ import annotations

import socket
import traceback

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import Conninfo

from bufstore import BufstoreError, ConfigError, StoreMisconfigured
from bufstore.postgres.connection.conninfo import check_conninfo, own_conninfo
from bufstore.postgres.connection.pool import connect

#: Nobody listens there.
NOWHERE = "host=127.0.0.1 port=1 user=u dbname=d"
SECRET = "s3cr3t-0123456789"
#: The parameters of which an operator must see what they are to mend them, as in a refused login.
NAMES = {"host", "hostaddr", "user", "dbname", "service"}


@pytest.mark.parametrize("url", ["postgresql://u:p@h:5/d\n", " postgres://u:p@h:5/d", "\tpostgresql://u:p@h:5/d\r\n"])
def test_space_around_a_url_is_no_part_of_it(url: str) -> None:
    """Regression: a URL out of a file, with the newline at its end, named a database that does not exist."""
    fields = {"user": "u", "password": "p", "host": "h", "port": "5", "dbname": "d"}
    assert check_conninfo(url) == fields
    assert conninfo_to_dict(own_conninfo(url))["dbname"] == "d"
    assert check_conninfo("host=h password='p ' dbname=d\\ ")["dbname"] == "d ", "libpq itself reads this"


@pytest.mark.parametrize("name", ["pgbouncer", "pool_size"])
def test_a_parameter_that_libpq_does_not_know_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"does not know, {name}: leave it out") as refused:
        check_conninfo(f"postgresql://u:{SECRET}@h/d?sslmode=require&{name}={SECRET}")
    assert SECRET not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize(
    "dsn",
    [
        *("postgresql://u:p/?{}=x@h/d", "postgresql://u:1/?{}=x@h/d", "host=h password=p {}=x"),
        *("postgresql://h/d?user=u&password=p&{}", "postgresql://h/d?password=p&{}=x", "postgresql://h/d?{}=p=x"),
        "postgresql://h/d?sslpassword=p&{}=x",
    ],
)
def test_a_piece_of_a_password_is_not_named_as_a_parameter(dsn: str) -> None:
    piece = SECRET[0] * 9  # not as such in a line that a traceback shows
    with pytest.raises(ConfigError, match="cannot be read") as refused:
        check_conninfo(dsn.format(piece))
    assert piece not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize("port", ["0", "65536", "99999", "5432,70000"])
def test_a_port_that_cannot_be_is_refused(port: str) -> None:
    with pytest.raises(ConfigError, match="no usable host and port"):
        check_conninfo(f"host=a,b port={port}")
    assert check_conninfo("host=a,b port=5432,")["port"] == "5432,"


@pytest.mark.parametrize("seconds", [SECRET, "inf", "nan"])
def test_a_time_that_is_none_is_refused(seconds: str) -> None:
    """Regression: psycopg's error of it was no OperationalError, and Postgres was called away."""
    with pytest.raises(ConfigError, match="connect_timeout") as refused:
        check_conninfo(f"host=h connect_timeout={seconds}")
    assert SECRET not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"service": "nope"}, 'definition of service "nope" not found'),
        ({"gssencmode": "require"}, "GSSAPI"),
        ({"host": "127.0.0.1,127.0.0.1", "port": "1,1,1"}, "could not match 3 port numbers to 2 hosts"),
        ({"hostaddr": "nowhere"}, "could not parse network address"),
        ({"sslmode": SECRET}, r"invalid sslmode value: \*\*\*"),
        ({"require_auth": SECRET + '"\n"'}, r"invalid require_auth value: \*\*\*"),
        ({"ssl_min_protocol_version": SECRET}, r"ssl_min_protocol_version\"? value: \*\*\*"),
        ({"keepalives_idle": SECRET}, r"invalid integer value \*\*\* for connection option \"keepalives_idle\""),
    ],
)
async def test_what_libpq_does_not_even_try_is_a_misconfiguration(wrong: dict[str, str], said: str) -> None:
    """Regression: each was an outage, most of them "connection failed" and no more."""
    with pytest.raises(StoreMisconfigured, match=said):
        await connect(make_conninfo(NOWHERE, **wrong))


@pytest.mark.parametrize("special", ["", '"', "\n", '"\n"', ": ", "'\\"], ids=repr)
async def test_no_parameter_of_libpq_shows_a_secret_in_an_error(special: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    tried = 0
    for name in (option.keyword.decode() for option in Conninfo.get_defaults()):
        if name in NAMES:
            continue
        with pytest.raises(BufstoreError) as failed:
            await connect(own_conninfo(make_conninfo(NOWHERE, **{name: special + SECRET + special + SECRET})))
        assert SECRET not in "".join(traceback.format_exception(failed.value)), name
        tried += 1
    assert tried > 30
