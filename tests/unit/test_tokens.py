"""Exclusive work without a server: configuration, records, compare-and-set with lost answers, error codes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore import BufstoreError, ConfigError, NatsConfig
from bufstore.errors import Closed, LogFull, LogUnavailable
from bufstore.jetstream.connection import Connection
from bufstore.jetstream.ensure import first_token
from bufstore.jetstream.errors import (
    ApiError,
    ConsumerMissing,
    MessageMissing,
    StorageFailed,
    StorageFull,
    StreamMissing,
    StreamTaken,
    SubjectFull,
    TooManyMessages,
    to_error,
)
from bufstore.jetstream.messages import AppendUnknown, Conflict, Outgoing, StoredMessage
from bufstore.tokens import ExclusiveWork, Policy, Task, TokensConfig
from bufstore.tokens.fence import Register
from bufstore.tokens.model import Record, attempt_of, backoff_s, decode, done_to, encode, is_young, items_config
from unit.fake_log import run


@pytest.mark.parametrize(
    "wrong",
    [{"name": ""}, {"name": "a.b"}, {"name": "x" * 65}, {"ttl_s": 0.5}, {"ttl_s": 1e9}, {"timeout_s": 0},
     {"waiting_max": 0}, {"replicas": 0}, {"replicas": 6}, {"storage": "paper"}, {"max_bytes": 0},
     {"max_attempts": -1}],
)  # fmt: skip
def test_a_configuration_that_cannot_work_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        TokensConfig(**wrong)


def test_the_policies_are_the_streams() -> None:
    def items(policy: Policy) -> tuple[int, str, bool]:
        c = items_config(TokensConfig(policy=policy, waiting_max=7))
        return c["max_msgs_per_subject"], c["discard"], c["discard_new_per_subject"]

    assert items(Policy.QUEUE) == (7, "new", True)
    assert items(Policy.REPLACE) == (1, "new", False)
    assert items(Policy.REFUSE) == (1, "new", True)


def test_records() -> None:
    record = Record("me", "mark", 3, 7, 5, "s", 2, lease_s=30.0)
    assert decode(encode(record)) == record
    assert decode(b"") == decode(b"\x91\x01") == Record()


@pytest.mark.parametrize(
    ("first", "young"), [("12:00:00", True), ("11:59:51", True), ("11:59:49", False), ("13:00:00", False)]
)
def test_what_the_future_holds_is_old(first: str, young: bool) -> None:
    info = {"ts": "2026-11-27T12:00:00Z", "state": {"messages": 1, "first_ts": f"2026-11-27T{first}Z"}}
    assert is_young(info, 10.0) is young
    assert is_young(info | {"state": {"messages": 0, "first_ts": "0001-01-01T00:00:00Z"}}, 10.0)


def test_attempts_are_those_of_the_item() -> None:
    assert attempt_of(Record(), 5) == 1
    assert attempt_of(Record(item=5, attempt=3), 5) == 4
    assert attempt_of(Record(item=4, attempt=3), 5) == 1
    assert attempt_of(Record(item=5, attempt=3, done=True), 5) == 1


def test_what_is_done_is_told_from_the_record_of_the_same_stream() -> None:
    assert done_to(Record(item=5, stream="s", done=True), "s") == 5
    assert done_to(Record(item=5, stream="s"), "s") == 4
    assert done_to(Record(item=5, stream="s", done=True), "another") == 0


@given(st.integers(1, 10**9))
def test_the_pause_grows_with_the_attempts_and_has_an_end(attempt: int) -> None:
    assert 0 < backoff_s(attempt) <= backoff_s(attempt + 1) <= 60


def test_the_tokens_of_a_stream_made_later_are_larger() -> None:
    a_million_tokens_a_second_for_a_day = 86_400 * 1_000_000
    today = 1_800_000_000_000
    assert first_token(today) + a_million_tokens_a_second_for_a_day < first_token(today + 86_400_000)
    assert first_token(today * 2) < 1 << 53  # exact in JSON numbers everywhere, and in a bigint


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        (10071, "wrong last sequence: 5", Conflict),
        (10164, "wrong last sequence", Conflict),
        (10077, "maximum messages per subject exceeded", SubjectFull),
        (10077, "maximum bytes exceeded", LogFull),
        (10077, "maximum messages exceeded", TooManyMessages),
        (10077, "write x.blk: no space left on device", StorageFull),
        (10002, "resource limits exceeded for account", StorageFull),
        (10047, "insufficient storage resources", StorageFull),
        (10023, "insufficient resources", StorageFull),
        (10028, "insufficient memory resources available", StorageFull),
        (10026, "maximum consumers limit reached", ConfigError),
        (10027, "maximum number of streams reached", ConfigError),
        (10037, "no message found", MessageMissing),
        (10043, "stream msg not found", MessageMissing),
        (10057, "sequence not found", MessageMissing),
        (10059, "stream not found", StreamMissing),
        (10014, "consumer not found", ConsumerMissing),
        (10008, "JetStream system temporarily unavailable", LogUnavailable),
        (10009, "no leader", LogUnavailable),
        (10005, "no suitable peers for placement, peer offline", LogUnavailable),
        (10005, "no suitable peers for placement, tags not matched ['ssd']", ConfigError),
        (10052, "invalid configuration", ConfigError),
        (10054, "message size exceeds maximum allowed", ConfigError),
        (10058, "stream name already in use", StreamTaken),
        (10065, "subjects overlap", ConfigError),
        (10076, "JetStream not enabled", ConfigError),
        (10039, "JetStream not enabled for account", ConfigError),
        (10098, "workqueue stream requires explicit ack", ConfigError),
        (10099, "multiple non-filtered consumers", ConfigError),
        (10100, "filtered consumer not unique", ConfigError),
        (10148, "consumer already exists", ConfigError),
        (10165, "invalid per-message TTL", ConfigError),
        (10166, "per-message TTL is disabled", ConfigError),
    ],
)
def test_every_error_code_has_its_error(code: int, text: str, kind: type[Exception]) -> None:
    error = to_error(ApiError(code=400, err_code=code, description=text), "S")
    assert type(error) is kind
    assert text in str(error) or code in (10076, 10039)


@pytest.mark.parametrize(
    ("status", "code", "text", "kind"),
    [
        (500, 10118, "stream is offline", LogUnavailable),
        (500, 10119, "consumer is offline", LogUnavailable),
        (500, 10041, "raft: not leader", LogUnavailable),
        (500, 10049, "stream name can not contain spaces", ConfigError),
        (500, 10069, "can not change storage type", ConfigError),
        (500, 10012, "start sequence can not be updated", ConfigError),
        (500, 10012, "error creating store for consumer", StorageFailed),
        (500, 10049, "open meta.inf: no space left on device", StorageFailed),
        (500, 10069, "open meta.inf: no space left on device", StorageFailed),
        (500, 10051, "write 2.blk: no space left on device", StorageFailed),
        (503, 10077, "bad sector", StorageFailed),
        (503, 99999, "unheard of", LogUnavailable),
        (429, 99999, "too many requests", LogUnavailable),
        (400, 99999, "unheard of", ConfigError),
    ],
)
def test_what_may_be_over_later_is_no_configuration_that_cannot_work(
    status: int, code: int, text: str, kind: type[Exception]
) -> None:
    error = to_error(ApiError(code=status, err_code=code, description=text), "S")
    assert type(error) is kind
    assert text in str(error)


def test_a_full_disk_is_told_alike_whichever_consumer_cannot_be_made() -> None:
    """The flusher logged each of its attempts, several a second."""
    why = "no space left on device"
    texts = [f"write /data/a b/obs/name-{n}/o.dat.tmp: {why}" for n in range(2)]
    one, two = (str(to_error(ApiError(code=500, err_code=10012, description=text), "S")) for text in texts)
    assert one == two
    assert f"({why})" in one


def test_fewer_nodes_than_replicas_may_be_a_cluster_that_is_being_started() -> None:
    """Regression: it was told to change size, replicas or placement, and not that the last node may just be missing."""
    error = to_error(ApiError(code=400, err_code=10005, description="no suitable peers for placement"), "S")
    assert type(error) is ConfigError
    assert "open again once all nodes are there" in str(error)


MINE = Record("me", "mark")


class Lossy:
    """One subject; answers are lost before or after the write is stored, as told."""

    name, replicated = "S", False

    def __init__(self, *outcomes: str) -> None:
        self.outcomes = list(outcomes)
        self.seq = 0
        self.body = b""

    async def publish(self, message: Outgoing, timeout_s: float) -> int:
        outcome = self.outcomes.pop(0) if self.outcomes else ""
        if outcome == "away":
            raise LogUnavailable("away")
        if outcome == "lost before":
            raise AppendUnknown("no answer")
        if message.expected != self.seq:
            raise Conflict
        self.seq += 1
        self.body = message.body
        if outcome == "lost after":
            raise AppendUnknown("no answer")
        return self.seq

    async def last(self, subjects: list[str], timeout_s: float) -> dict[str, StoredMessage]:
        return {subjects[0]: StoredMessage(subjects[0], self.seq, None, self.body)} if self.seq else {}


@pytest.mark.parametrize("outcomes", [[], ["lost before"], ["lost after"], ["away", "lost before", "lost after"]])
async def test_a_write_ends_as_stored_whatever_answers_are_lost(outcomes: list[str]) -> None:
    stream: Any = Lossy(*outcomes)
    register = Register(stream, 5)
    assert await register.write("s", MINE, 0) == 1
    assert (stream.seq, stream.body) == (1, encode(MINE))


async def test_a_write_that_came_too_late_is_a_conflict_also_after_lost_answers() -> None:
    stream: Any = Lossy("lost before")
    register = Register(stream, 5)
    writing = asyncio.ensure_future(register.write("s", MINE, 0))
    await asyncio.sleep(0)
    stream.seq, stream.body = 1, b"another's"
    with pytest.raises(Conflict):
        await writing
    assert stream.body == b"another's"


async def test_what_was_written_is_not_read_as_it_was_before() -> None:
    """A leader that the others have left goes on answering for seconds."""

    class Left(Lossy):
        replicated = True

        def __init__(self) -> None:
            super().__init__()
            self.shown: dict[str, StoredMessage] = {}
            self.proofs = 0

        async def last(self, subjects: list[str], timeout_s: float) -> dict[str, StoredMessage]:
            return self.shown

        async def ends(self, filters: list[str], timeout_s: float) -> list[int]:
            return [0 for _ in filters]

        async def prove(self, unused: str, timeout_s: float) -> None:
            self.proofs += 1
            await asyncio.sleep(0)
            self.shown = await Lossy.last(self, ["s"], timeout_s)

    stream: Any = Left()
    register = Register(stream, 5)
    await register.write("s", MINE, 0)
    assert await register.read("s") == (1, MINE)
    assert stream.proofs == 1
    stream.seq, stream.shown = 0, {}  # it was removed meanwhile, and several callers find that at once
    assert await asyncio.gather(*(register.read("s") for _ in range(3))) == 3 * [(0, Record())]
    proofs = stream.proofs
    assert await register.read("s") == (0, Record())
    assert stream.proofs == proofs, "that it is gone is believed from then on"


async def test_a_write_that_nobody_answers_says_so() -> None:
    stream: Any = Lossy(*["away"] * 10_000)
    with pytest.raises(LogUnavailable):
        await Register(stream, 0.1).write("s", MINE, 0)


def test_all_errors_are_ours() -> None:
    assert issubclass(SubjectFull, BufstoreError)
    assert issubclass(MessageMissing, BufstoreError)


def test_when_one_worker_fails_none_works_on() -> None:
    async def main() -> None:
        work = ExclusiveWork(Connection(NatsConfig(), "not opened"), "$JS.API", TokensConfig())
        taking = 0

        async def take() -> None:
            nonlocal taking
            taking += 1
            try:
                await asyncio.sleep(1 if taking == 1 else 3600)
                raise Closed("the store is closed")
            finally:
                taking -= 1

        work.take = take  # type: ignore[method-assign, assignment]
        with pytest.raises(Closed):
            await work.run(nothing, asyncio.Event(), concurrency=3)
        assert taking == 0

    async def nothing(_: Task) -> None: ...

    run(main())


def test_what_nats_refuses_for_a_while_ends_no_worker_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    right, full = ConfigError("NATS does not permit it"), LogFull("NATS has no storage left")

    async def main() -> None:
        work = ExclusiveWork(Connection(NatsConfig(), "not opened"), "$JS.API", TokensConfig())
        outcomes = iter([right, right, full, full, None, full, Closed("the store is closed")])

        async def take() -> None:
            if error := next(outcomes):
                raise error

        work.take = take  # type: ignore[method-assign, assignment]
        with pytest.raises(Closed):
            await work.run(nothing, asyncio.Event())
        said = [str(right), str(full)]  # once per series
        assert [r.getMessage().partition("will try again: ")[2] for r in caplog.records] == said
        outcomes = iter([right])
        work._connection.closes_here = lambda: False  # type: ignore[method-assign]
        with pytest.raises(ConfigError):  # in a forked process
            await work.run(nothing, asyncio.Event())

    async def nothing(_: Task) -> None: ...

    run(main())


def test_what_one_worker_is_refused_is_said_once_also_while_another_works(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        work = ExclusiveWork(Connection(NatsConfig(), "not opened"), "$JS.API", TokensConfig())
        waits, refused = False, 0

        async def take() -> None:
            nonlocal waits, refused
            if waits:
                refused += 1
                raise LogFull("no storage left") if refused < 30 else Closed("the store is closed")
            waits = True
            await asyncio.sleep(2)
            waits = False

        work.take = take  # type: ignore[method-assign, assignment]
        for runs in (1, 2):
            waits, refused = False, 0
            with pytest.raises(Closed):
                await work.run(nothing, asyncio.Event(), concurrency=2)
            assert len(caplog.records) == runs

    async def nothing(_: Task) -> None: ...

    run(main())
