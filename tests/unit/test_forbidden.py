"""The log names what NATS does not permit, once in a while, and not each id of it."""

from __future__ import annotations

import pytest
from nats.errors import Error

from bufstore.jetstream import forbidden
from bufstore.jetstream.forbidden import Forbidden


def refused(subject: str) -> Error:
    return Error(f"nats: 'Permissions Violation for Publish to \"{subject}\"'")


def test_subjects_that_differ_in_an_id_use_up_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty refused hints once used up all lines, and later refusals were not told."""
    now = 0.0
    monkeypatch.setattr(forbidden.time, "monotonic", lambda: now)
    told = Forbidden()

    def lines(*subjects: str) -> list[str]:
        caplog.clear()
        for subject in subjects:
            told.tell(refused(subject))
        return [record.getMessage().rpartition(" ")[2] for record in caplog.records]

    ids = [f"nn.hint.{n}" for n in range(50)] + [f"$KV.mailbox.l.{n}.a" for n in range(50)]
    assert lines(*ids, "_INBOX.abc.1", "_INBOX.def.2", "$JS.ACK.S.c.1.1") == [
        "'nn.hint.>'", "'$kv.mailbox.>'", "'_inbox.>'", "'$js.ack.>'",
    ]  # fmt: skip
    assert lines("$JS.API.DIRECT.GET.A", "$JS.API.DIRECT.GET.B", "threads-groups") == [
        "'$js.api.direct.get.a'", "'$js.api.direct.get.b'", "'threads-groups'",
    ]  # fmt: skip
    consumers = [f"$JS.API.CONSUMER.CREATE.S.c{n}.groups.0" for n in range(50)]
    more = [f"$JS.hub.API.CONSUMER.MSG.NEXT.S.c{n}" for n in range(50)]
    assert lines(*consumers, *more) == ["'$js.api.consumer.create.s.>'", "'$js.hub.api.consumer.msg.next.s.>'"]
    assert lines("$JS.hub.API.STREAM.INFO.A", "$JS.hub.API.INFO", "$JS.ACK.API.c.1.1") == [
        "'$js.hub.api.stream.info.a'", "'$js.hub.api.info'",
    ], "an ack of a stream that is named API was told above"  # fmt: skip
    assert lines("nn.hint.7") == []
    now = 601.0
    assert lines("nn.hint.8") == ["'nn.hint.>'"], "it may have been permitted in between"
