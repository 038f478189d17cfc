"""The rights of roles, as far as they can be checked without a server."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from bufstore import LogConfig
from bufstore.buffer.lanes import lane_logs
from bufstore.cli.app import app as command_line
from bufstore.nats.permissions import Role, permissions

_LOG = LogConfig(stream="S", bucket="b", subject="words")


def test_each_role_may_do_what_those_before_it_may() -> None:
    app, flusher, operator = (permissions(role, _LOG) for role in Role)
    for less, more in ((app, flusher), (flusher, operator)):
        assert set(less.publish) < set(more.publish)
        assert set(less.subscribe) <= set(more.subscribe)


def test_only_this_log_is_meant_and_an_app_can_remove_nothing() -> None:
    ours = {"S", "KV_b", "words", "words-flush", "words-parked", "words-writers", "words-refused", "b"}
    for role in Role:
        found = permissions(role, _LOG, "$JS.hub.API")
        for subject in {*found.publish, *found.subscribe} - {"_INBOX.>", "$JS.hub.API.INFO"}:
            assert ours & set(subject.split(".")), subject
    removing = ("PURGE", "DELETE", "UPDATE", "CREATE")
    assert not [s for s in permissions(Role.APP, _LOG).publish if any(verb in s for verb in removing)]


def test_keys_are_written_beside_another_api_too() -> None:
    """A leaf node checks those with the API's prefix; with another account's API, the plain ones count."""
    for role in Role:
        plain, leaf = (set(permissions(role, _LOG, api).publish) for api in ("$JS.API", "$JS.hub.API"))
        keys = {s for s in plain if s.startswith("$KV.")}
        assert {s for s in leaf if "$KV." in s} == keys | {f"$JS.hub.API.{s}" for s in keys}
        assert {s for s in plain if "$KV." in s} == keys


@pytest.mark.parametrize("role", Role)
def test_the_command_prints_just_these(role: Role) -> None:
    names = ("--stream", "S", "--bucket", "b", "--subject", "words", "--replicas", "3", "--api-prefix", "$JS.hub.API")
    wanted = permissions(role, LogConfig(stream="S", bucket="b", subject="words", replicas=3), "$JS.hub.API")
    printed = CliRunner().invoke(command_line, ["permissions", role.value, *names])
    assert (printed.exit_code, printed.output) == (0, wanted.config() + "\n")
    as_json = CliRunner().invoke(command_line, ["permissions", role.value, *names, "--json"])
    assert json.loads(as_json.output) == {"publish": wanted.publish, "subscribe": wanted.subscribe}
    assert CliRunner().invoke(command_line, ["permissions", role.value, "--stream", "a b"]).exit_code == 2


def test_a_lane_that_is_not_the_first_is_meant_alone() -> None:
    first, second = lane_logs(replace(_LOG, lanes=2))
    both, alone = permissions(Role.APP, first), permissions(Role.APP, second)
    assert set(alone.publish) < set(both.publish)
    assert not [s for s in alone.publish if s.endswith(f".{first.stream}")]
