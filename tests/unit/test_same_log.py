"""Whether a log is still the one that we wrote to, by the answers of a cluster that elects its leaders."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import nats.errors
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore.buffer.groups.group import Draft
from bufstore.buffer.groups.heads import Heads
from bufstore.buffer.groups.last_seen import LastSeen, Seen
from bufstore.buffer.subjects import Subjects
from bufstore.config import BufferConfig, LogConfig
from bufstore.errors import LogRolledBack, LogUnavailable
from bufstore.jetstream.direct_gets import Shown
from bufstore.jetstream.messages import HEADER, Outgoing, StoredMessage
from bufstore.nats.log import NatsLog
from bufstore.nats.same_log import GONE_S, SameLog, Unproven
from bufstore.nats.setup import out_of_service
from unit.fake_log import run

CONFIG = BufferConfig(log=LogConfig(replicas=3))
SINGLE = BufferConfig(log=LogConfig(replicas=1))
NO_STREAM = {"error": {"code": 404, "err_code": 10059, "description": "stream not found"}}
NO_ROOM = {"error": {"code": 503, "err_code": 10077, "description": "maximum bytes exceeded"}}


def info(end: int, subjects: str = "thread.*.*") -> dict[str, Any]:
    config = {"name": "THREADLOG", "subjects": [subjects], "metadata": {}}
    return {"state": {"last_seq": end, "first_seq": 1}, "config": config}


class Cluster:
    """Answers requests by their kind, in turn; the last answer is repeated."""

    def __init__(self, info: list[Any], barrier: list[Any]) -> None:
        self.answers = {"info": info, "barrier": barrier}
        self.asked: list[str] = []

    async def request(self, subject: str, payload: bytes, timeout: float, headers: Any = None) -> Any:
        kind = "info" if "STREAM.INFO" in subject else "barrier"
        self.asked.append(kind)
        answers = self.answers[kind]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(data=json.dumps(answer).encode())


def look(
    cluster: Cluster, *, seen: int = 20_662, replicas: int = 3, times: int = 1, pause_s: float = 0.0
) -> str | None:
    """The result of the last of `times` looks."""

    async def main() -> str | None:
        same = SameLog("THREADLOG", out_of_service(CONFIG.log), replicas > 1)
        same.note(seen)
        for _ in range(times - 1):
            with pytest.raises(Unproven):
                await same.look(cluster, "$JS.API.STREAM.INFO.THREADLOG", "thread.barrier.0")  # type: ignore[arg-type]
            await asyncio.sleep(pause_s)
        return await same.look(cluster, "$JS.API.STREAM.INFO.THREADLOG", "thread.barrier.0")  # type: ignore[arg-type]

    return run(main())


@pytest.mark.parametrize(
    "barrier", [nats.errors.NoRespondersError(), NO_ROOM, {"error": {"code": 503, "err_code": 10008}}]
)
def test_an_old_end_is_not_believed_of_one_who_cannot_prove_that_he_leads(barrier: Any) -> None:
    """Observed: during an election the end was old, and nobody answered the write that was to prove it."""
    with pytest.raises(Unproven):
        look(Cluster([info(20_417)], [barrier]))


def test_one_who_does_not_answer_has_proved_nothing() -> None:
    with pytest.raises(nats.errors.TimeoutError):
        look(Cluster([info(20_417)], [nats.errors.TimeoutError()]))


def test_an_old_end_is_not_believed_when_the_log_goes_on_behind_what_was_seen() -> None:
    """The node that showed the old end did not lead any more; the one that stored the write does."""
    assert look(Cluster([info(20_417)], [{"stream": "THREADLOG", "seq": 20_876}])) is None


def test_a_log_that_goes_on_before_what_was_seen_went_back() -> None:
    assert "goes on at 20418" in (look(Cluster([info(20_417)], [{"stream": "THREADLOG", "seq": 20_418}])) or "")


def test_a_log_that_was_withdrawn_is_told_by_its_configuration() -> None:
    cluster = Cluster([info(20_417, out_of_service(CONFIG.log))], [nats.errors.NoRespondersError()])
    assert "repair" in (look(cluster) or "")
    assert cluster.asked == ["info"]


def test_a_single_server_is_believed() -> None:
    assert "ends at 20417" in (look(Cluster([info(20_417)], [AssertionError]), replicas=1) or "")
    assert "is gone" in (look(Cluster([NO_STREAM], [AssertionError]), replicas=1) or "")


def test_a_stream_that_a_cluster_does_not_know_is_gone_only_when_that_stays_so() -> None:
    """The others may have left the leader of all streams before this one was made."""
    cluster = Cluster([NO_STREAM], [nats.errors.NoRespondersError()])
    assert "is gone" in (look(cluster, times=3, pause_s=GONE_S / 2 + 1) or "")


@pytest.mark.parametrize("there", ["shown", "written to"])
def test_a_stream_that_was_there_in_between_is_not_gone_since_the_first_time(there: str) -> None:
    """Else one more election, long after the first, would be taken for the end of the log."""
    nobody = nats.errors.NoRespondersError()
    shown = info(20_700) if there == "shown" else NO_STREAM
    stored = [nobody] if there == "shown" else [nobody, {"stream": "THREADLOG", "seq": 20_700}, nobody]

    async def main() -> None:
        same = SameLog("THREADLOG", out_of_service(CONFIG.log), True)
        same.note(20_662)
        cluster: Any = Cluster([NO_STREAM, shown, NO_STREAM], stored)

        async def look() -> str | None:
            return await same.look(cluster, "$JS.API.STREAM.INFO.THREADLOG", "thread.barrier.0")

        with pytest.raises(Unproven):
            await look()
        assert await look() is None
        await asyncio.sleep(GONE_S + 1)
        with pytest.raises(Unproven):
            await look()
        await asyncio.sleep(GONE_S + 1)
        assert "is gone" in (await look() or "")

    run(main())


def test_a_stream_that_takes_writes_is_not_gone() -> None:
    assert look(Cluster([NO_STREAM], [{"stream": "THREADLOG", "seq": 20_700}])) is None


def test_a_question_that_was_lost_in_an_election_is_asked_again() -> None:
    lost = [nats.errors.TimeoutError(), nats.errors.TimeoutError()]
    assert look(Cluster([*lost, info(20_700)], [AssertionError])) is None


@given(end=st.integers(0, 200), seen=st.integers(1, 100), stored=st.integers(0, 200))
def test_a_replicated_log_is_refused_only_by_what_was_stored(end: int, seen: int, stored: int) -> None:
    cluster = Cluster([info(end)], [{"seq": stored}])
    try:
        reason = look(cluster, seen=seen)
    except Unproven:
        assert end < seen and not stored
    else:
        assert (reason is not None) == (end < seen and 0 < stored <= seen)


class Connection:
    """A connection as `NatsLog` needs it: requests and writes, answered by the test."""

    def __init__(self) -> None:
        self.end = 0
        self.messages: dict[int, tuple[str, str]] = {}

    def on_connect(self, hook: Any) -> None:
        self.check = hook

    def on_lost(self, hook: Any) -> None: ...

    async def request(self, subject: str, payload: bytes, timeout_s: float, *, again: bool = False) -> bytes:
        if "STREAM.INFO" in subject:
            return json.dumps(info(self.end)).encode()
        asked = json.loads(payload)
        if "last_by_subj" in asked:
            seq = max((n for n, (on, _) in self.messages.items() if on == asked["last_by_subj"]), default=0)
        else:
            seq = asked["seq"]
        found = self.messages.get(seq)
        if found is None:
            return json.dumps({"error": {"code": 404, "err_code": 10037}}).encode()
        headers = f"NATS/1.0\r\n{HEADER}: {found[1]}\r\n\r\n"
        message = {"subject": found[0], "seq": seq, "hdrs": base64.b64encode(headers.encode()).decode()}
        return json.dumps({"message": message}).encode()

    async def write(self, messages: list[Outgoing], batch: Any, timeout_s: float, *, doubt: Any = None) -> bytes:
        for message in messages:
            self.end += 1
            self.messages[self.end] = (message.subject, message.header or "")
        return json.dumps({"stream": "THREADLOG", "seq": self.end}).encode()


async def accepted(log: NatsLog, after_s: float = 5.0) -> bool:
    await asyncio.sleep(after_s)
    return log.refused is None


def refused(main: Callable[[NatsLog, Connection], Awaitable[None]], config: BufferConfig = CONFIG) -> None:
    """Run `main` on a log that was refused after this process had written three entries to it."""

    async def whole() -> None:
        connection = Connection()
        log = NatsLog(connection, "$JS.API", config)  # type: ignore[arg-type]
        for n in range(3):
            await log.publish(Outgoing("thread.0.t", b"", header=f"entry {n}"), 1.0)
        connection.end = 2
        await log._check_end(Cluster([info(2)], [{"seq": 3}]))  # type: ignore[arg-type]
        assert log.refused is not None
        with pytest.raises(LogRolledBack):
            await log.publish(Outgoing("thread.0.t", b"", header="more"), 1.0)
        assert not await accepted(log), "it still ends before what was seen"
        try:
            await main(log, connection)
        finally:
            await log.aclose()

    run(whole())


def test_a_refused_log_is_taken_again_once_it_has_come_past_what_was_seen() -> None:
    async def main(log: NatsLog, connection: Connection) -> None:
        connection.end = 7
        assert await accepted(log)
        assert await log.publish(Outgoing("thread.0.t", b"", header="more"), 1.0) == connection.end

    refused(main)


def test_a_refused_log_is_not_taken_again_with_other_entries() -> None:
    async def main(log: NatsLog, connection: Connection) -> None:
        connection.messages[3] = ("thread.0.t", "of another")
        connection.end = 7
        assert not await accepted(log)
        connection.messages[3] = ("barrier", "")
        assert not await accepted(log)

    refused(main)


def test_a_refused_log_is_not_taken_again_when_postgres_says_otherwise() -> None:
    async def main(log: NatsLog, connection: Connection) -> None:
        answers: list[Any] = [LogUnavailable("no answer"), "the entry at the cursor is another one"]

        async def mismatch() -> str | None:
            answer = answers[0]
            if isinstance(answer, Exception):
                raise answer
            assert await log.end(1.0) == connection.end, "who looks is not refused"
            return answer  # type: ignore[no-any-return]

        log.vouched_by(mismatch)
        connection.end = 7
        assert not await accepted(log)
        del answers[0]
        assert not await accepted(log)
        answers[0] = None
        assert await accepted(log)

    refused(main)


class Elsewhere:
    """Postgres, as long as it is another one, and others who write, flush and purge meanwhile."""

    def __init__(self, log: NatsLog, connection: Connection) -> None:
        self.another: str | None = "the entry at the cursor is another one"
        self._messages, self._connection = connection.messages, connection
        log.vouched_by(self._mismatch)

    async def _mismatch(self) -> str | None:
        return self.another

    def wrote(self, *seqs: int, what: str = "group") -> None:
        for seq in seqs:
            self._messages[seq] = (Subjects(CONFIG.log.subject, CONFIG.log.partitions).groups, f"{what} {seq}")
        self._connection.end = max(seqs)

    def purged(self, *seqs: int) -> None:
        for seq in seqs:
            del self._messages[seq]


def test_what_we_wrote_may_be_purged_once_the_refused_log_was_seen_to_hold_it() -> None:
    """Regression: the process refused the log until it was started again."""

    async def main(log: NatsLog, connection: Connection) -> None:
        elsewhere = Elsewhere(log, connection)
        elsewhere.wrote(4, 5, 6, 7)
        assert not await accepted(log)
        elsewhere.purged(1, 2, 3, 4)
        elsewhere.wrote(8)
        assert not await accepted(log)
        elsewhere.purged(5, 6, 7)
        elsewhere.another = None
        assert await accepted(log)

    refused(main)


@pytest.mark.parametrize("lost", ["what we wrote", "and was not looked at since", "what stood behind it"])
def test_a_refused_log_is_not_taken_again_where_it_may_have_lost_what_we_wrote(lost: str) -> None:
    async def main(log: NatsLog, connection: Connection) -> None:
        elsewhere = Elsewhere(log, connection)
        if lost == "what stood behind it":
            elsewhere.wrote(4, 5, 6)
            assert not await accepted(log)
            elsewhere.wrote(6, 7, 8, what="of another")
        elif lost == "and was not looked at since":
            elsewhere.wrote(4, 5, 6, 7)
            elsewhere.purged(4)
        else:
            elsewhere.wrote(3, 4, 5, what="of another")
            assert not await accepted(log)
        elsewhere.purged(1, 2, 3)
        elsewhere.another = None
        assert not await accepted(log)

    refused(main)


def test_a_single_server_may_come_past_what_was_seen_too() -> None:
    """A copy was restored, and then a better one."""

    async def main() -> None:
        connection = Connection()
        log = NatsLog(connection, "$JS.API", SINGLE)  # type: ignore[arg-type]
        await log.publish(Outgoing("thread.0.t", b"", header="entry"), 1.0)
        await log._check_end(Cluster([info(0)], [AssertionError]))  # type: ignore[arg-type]
        assert log.refused is not None
        connection.end = 2
        assert await accepted(log)
        await log.aclose()

    run(main())


class Purged(NatsLog):
    """A replicated log that others wrote on and purged, whose reads are answered from a dict of its messages."""

    def __init__(self) -> None:
        connection: Any = SimpleNamespace(on_connect=lambda _: None, client=lambda: None)
        super().__init__(connection, "$JS.API", CONFIG)
        self.there: dict[int, StoredMessage] = {}
        self.last_seq = 0

    @property
    def groups(self) -> str:
        return self._subjects.groups

    def add(self, before: int) -> None:
        seq = self.last_seq + 1
        header = Draft(1000 + seq, []).header(1000 + before if before else 0, before, 0)
        self.there[seq] = StoredMessage(self.groups, seq, header, b"")
        self.last_seq = seq

    async def _look(self, timeout_s: float = 5.0) -> dict[str, Any]:
        return {"state": {"last_seq": self.last_seq, "first_seq": min(self.there)}, "config": {}}

    async def identity(self, seq: int) -> StoredMessage | None:
        return self.there.get(seq)

    async def last(self, subjects: Any, timeout_s: float) -> dict[str, StoredMessage]:
        newest = max(m.seq for m in self.there.values() if m.subject == self.groups)
        return {self.groups: self.there[newest]}

    async def ends(self, filters: Any, timeout_s: float) -> list[int]:
        return [max((m.seq for m in self.there.values() if m.subject == f), default=0) for f in filters]

    async def shown(self, subjects: Any, start: int, timeout_s: float) -> Shown:
        last = (max((m for m in self.there.values() if m.subject == s), key=lambda m: m.seq) for s in subjects)
        return Shown([*last], 0, self.last_seq)

    async def barrier(self, timeout_s: float) -> int:
        return await self._stored(Outgoing(self._subjects.proof, b""))

    async def _stored(self, message: Outgoing) -> int:
        self.last_seq += 1
        self.there[self.last_seq] = StoredMessage(message.subject, self.last_seq, None, b"")
        return self.last_seq


def test_a_log_that_others_purged_while_it_was_refused_is_accepted_again() -> None:
    """Regression: the proof for it was refused for ever, because the log was."""

    async def main() -> None:
        log = Purged()
        log.add(0)
        log.add(1)
        last = LastSeen(log, log.groups, Heads(), 5.0)
        last.begin(Seen(2, 1002), 0)
        log._same.note(2)
        log.vouched_by(last.mismatch)
        log.refuse(LogRolledBack("Postgres was another one for a while"))
        with pytest.raises(LogRolledBack):
            await log.fresh_end(5.0)
        for _ in range(3):
            log.add(log.last_seq)
        del log.there[1], log.there[2]
        await asyncio.sleep(10)
        assert log.refused is None
        assert await log.fresh_end(5.0) == 5
        await log.aclose()

    run(main())


@pytest.mark.parametrize(("api", "says"), [("$JS.API", "on this server: it"), ("$JS.hub.API", "this server has lost")])
def test_who_finds_nobody_behind_a_leaf_node_is_not_told_to_switch_jetstream_on_there(api: str, says: str) -> None:
    async def main() -> None:
        same, cluster = SameLog("THREADLOG", "withdrawn", False), Cluster([nats.errors.NoRespondersError()], [])
        same.note(1)
        with pytest.raises(Unproven, match=says):
            await same.look(cluster, f"{api}.STREAM.INFO.THREADLOG", "barrier")  # type: ignore[arg-type]

    run(main())
