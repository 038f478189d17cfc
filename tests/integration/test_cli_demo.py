"""`bufstore demo` as a process."""

from __future__ import annotations

from command_line import bufstore_cli, where
from conftest import Deployment


def test_demo_survives_an_outage_of_postgres_and_verifies_every_thread() -> None:
    result = bufstore_cli("demo", "--seconds", 12, "--outage", 4, "--writers", 40, "--think-ms", 20, "--json")
    assert result.code == 0, result
    report = result.json
    assert report["verified"] is True
    assert report["messages"] == report["acknowledged"] == report["flushed"] > 500
    assert (report["lost"], report["mismatched"], report["refused"], report["quarantined"]) == (0, 0, 0, 0)
    assert report["outage_s"] >= 4
    assert 100 < report["accepted_during_outage"] <= report["lag_max"]
    assert report["postgres_transactions"] < report["acknowledged"] / 10
    # Progress is printed as lines, because the output is no terminal.
    assert "Postgres is down" in result.err
    assert "Traceback" not in result.err
    assert "WARNING" not in result.err


def test_demo_on_other_servers_leaves_them_running(made: Deployment) -> None:
    result = bufstore_cli("demo", "--seconds", 1, "--outage", 0.1, "--writers", 5, "--think-ms", 5, **where(made))
    assert result.code == 0, result
    assert "Verified: all " in result.out
    assert made.servers.postgres.running
