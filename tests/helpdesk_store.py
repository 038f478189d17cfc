"""An app's own store, as a help desk might have it: its own tables, names and types, none of bufstore's.

It has all that a store behind the buffer can offer: the two reads, `apply` for every field of a change, the queries.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

import psycopg
from psycopg.errors import UniqueViolation
from psycopg.rows import DictRow, dict_row
from psycopg_pool import AsyncConnectionPool

from bufstore import (
    Checkpoint,
    MessagePage,
    MessageQuery,
    MessageRecord,
    Run,
    RunPage,
    RunQuery,
    Thread,
    ThreadChange,
    ThreadMetadata,
    ThreadPage,
    ThreadQuery,
    decode_message,
    decode_metadata,
    decode_run,
)
from bufstore.threads.message_pages import LAST, check_range, message_page
from bufstore.threads.queries import (
    ALL_MESSAGES,
    ALL_RUNS,
    ALL_THREADS,
    LIMIT,
    check_limit,
    check_message_id,
    check_query,
    page_of,
    read_position,
    record_of,
)
from bufstore.types import check_id

TABLES = """
CREATE SEQUENCE desk_clock;
CREATE TABLE ticket (
    nr bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    ref text COLLATE "C" NOT NULL UNIQUE,
    part_of text,
    customer text,
    details bytea,
    scratchpad bytea,
    last_job text,
    running_job text,
    unfinished_job text,
    touched bigint NOT NULL
);
CREATE TABLE utterance (
    ticket bigint NOT NULL REFERENCES ticket ON DELETE CASCADE,
    line int NOT NULL,
    speaker text,
    body bytea NOT NULL,
    PRIMARY KEY (ticket, line)
);
CREATE TABLE job (
    ref text COLLATE "C" PRIMARY KEY,
    ticket bigint NOT NULL REFERENCES ticket ON DELETE CASCADE,
    state text NOT NULL,
    document bytea NOT NULL,
    born bigint NOT NULL DEFAULT nextval('desk_clock')
);
"""

_TICKET_OF = "(SELECT nr FROM ticket WHERE ref = %(ref)s)"
_PUT_TICKET = """
INSERT INTO ticket AS t (ref, part_of, customer, details, scratchpad, last_job, running_job, unfinished_job, touched)
VALUES (%(ref)s, %(part_of)s, %(customer)s, %(details)s, %(scratchpad)s, %(last)s, %(running)s, %(unfinished)s,
    nextval('desk_clock'))
ON CONFLICT (ref) DO UPDATE SET
    part_of = excluded.part_of,
    customer = excluded.customer,
    details = excluded.details,
    scratchpad = coalesce(excluded.scratchpad, t.scratchpad),
    last_job = excluded.last_job,
    running_job = excluded.running_job,
    unfinished_job = excluded.unfinished_job,
    touched = excluded.touched
"""
_PUT_JOB = f"""
INSERT INTO job AS j (ref, ticket, state, document) VALUES (%(job)s, {_TICKET_OF}, %(state)s, %(document)s)
ON CONFLICT (ref) DO UPDATE SET state = excluded.state, document = excluded.document WHERE j.ticket = excluded.ticket
"""


class HelpdeskStore:
    """Stores tickets, their utterances, and the jobs of the agents that work on them."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.pool = AsyncConnectionPool(dsn, min_size=1, max_size=4, open=False)

    async def __aenter__(self) -> Self:
        await self.pool.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.pool.close()

    # -- the one method that writes ----------------------------------------------------------------------------

    async def apply(self, connection: psycopg.AsyncConnection[Any], batch: Sequence[ThreadChange]) -> None:
        """See `WrappableStore.apply`."""
        async with connection.cursor(row_factory=dict_row) as cursor:
            deleted = [c.thread_id for c in batch if c.deleted]
            await cursor.execute("DELETE FROM ticket WHERE ref = ANY (%s)", [deleted])
            changes = sorted((c for c in batch if not c.gone), key=lambda c: c.thread_seq)
            await cursor.execute("SELECT * FROM ticket WHERE ref = ANY (%s)", [[c.thread_id for c in changes]])
            before = {row["ref"]: row for row in await cursor.fetchall()}
            await cursor.executemany(_PUT_TICKET, [_ticket(c, before.get(c.thread_id)) for c in changes])
            await cursor.executemany(
                f"DELETE FROM utterance WHERE ticket = {_TICKET_OF} AND line > %(keep)s",
                [{"ref": c.thread_id, "keep": c.keep} for c in changes],
            )
            await cursor.executemany(
                f"INSERT INTO utterance VALUES ({_TICKET_OF}, %(line)s, %(speaker)s, %(body)s)",
                [
                    {"ref": c.thread_id, "line": line, "speaker": _speaker(body), "body": body}
                    for c in changes
                    for line, body in enumerate(c.messages, c.keep + 1)
                ],
            )
            jobs = [(c.run_seqs.get(r, 0), c.thread_id, r, document) for c in changes for r, document in c.runs.items()]
            jobs.sort(key=lambda job: job[0])
            await cursor.executemany(_PUT_JOB, [_job(*job[1:]) for job in jobs])
            if jobs and cursor.rowcount != len(jobs):
                raise UniqueViolation("a job belongs to another ticket")

    # -- the two reads that the buffer needs -------------------------------------------------------------------

    async def load_checkpoint(self, thread_id: str) -> Checkpoint | None:
        """See `WrappableStore.load_checkpoint`."""
        async with self._snapshot() as cursor:
            await cursor.execute("SELECT * FROM ticket WHERE ref = %s", [check_id(thread_id, "thread_id")])
            ticket = await cursor.fetchone()
            if ticket is None:
                return None
            await cursor.execute("SELECT body FROM utterance WHERE ticket = %s ORDER BY line", [ticket["nr"]])
            messages = [decode_message(row["body"]) for row in await cursor.fetchall()]
            await cursor.execute("SELECT document FROM job WHERE ref = %s", [ticket["last_job"]])
            job = await cursor.fetchone()
        return Checkpoint(
            thread=_thread(ticket, len(messages)),
            messages=messages,
            latest_run=decode_run(job["document"]) if job else None,
            state=decode_message(ticket["scratchpad"]) if ticket["scratchpad"] is not None else None,
        )

    async def load_run(self, run_id: str) -> Run | None:
        """See `WrappableStore.load_run`."""
        async with self._snapshot() as cursor:
            await cursor.execute("SELECT document FROM job WHERE ref = %s", [check_id(run_id, "run_id")])
            row = await cursor.fetchone()
        return decode_run(row["document"]) if row else None

    # -- queries -----------------------------------------------------------------------------------------------

    async def query_messages(
        self, thread_id: str, query: MessageQuery = ALL_MESSAGES, *, limit: int = LIMIT, cursor: str | None = None
    ) -> MessagePage:
        """See `Queryable.query_messages`."""

        async def fetch(low: int, high: int, count: int, newest_first: bool) -> list[tuple[int, bytes]]:
            order = "DESC" if newest_first else "ASC"
            async with self._snapshot() as found:
                await found.execute(
                    f"SELECT line, body FROM utterance WHERE ticket = {_TICKET_OF}"
                    f" AND line BETWEEN %(low)s AND %(high)s ORDER BY line {order} LIMIT %(count)s",
                    {"ref": thread_id, "low": low, "high": high, "count": count},
                )
                return [(row["line"], row["body"]) for row in await found.fetchall()]

        return await message_page(thread_id, query, limit, cursor, fetch)

    async def load_message(self, thread_id: str, message_id: str) -> MessageRecord | None:
        """See `Queryable.load_message`."""
        check_message_id(message_id)
        records = await self.load_message_range(thread_id, 1, LAST)
        return next((r for r in records if r.message_id == message_id), None)

    async def load_message_range(self, thread_id: str, first: int, last: int) -> list[MessageRecord]:
        """See `Queryable.load_message_range`."""
        first, last = check_range(first, last)
        async with self._snapshot() as found:
            await found.execute(
                f"SELECT line, body FROM utterance WHERE ticket = {_TICKET_OF}"
                " AND line BETWEEN %(first)s AND %(last)s ORDER BY line",
                {"ref": check_id(thread_id, "thread_id"), "first": first, "last": last},
            )
            return [record_of(thread_id, row["line"], row["body"]) for row in await found.fetchall()]

    async def query_runs(self, query: RunQuery = ALL_RUNS, *, limit: int = LIMIT, cursor: str | None = None) -> RunPage:
        """See `Queryable.query_runs`."""
        check_query(query)
        limit, behind = check_limit(limit), read_position(cursor, query) or (0, "")
        where = {
            "ticket.ref = %(ticket)s": query.thread_id,
            "job.state = %(state)s": query.status,
            "starts_with(job.ref, %(prefix)s)": query.id_prefix,
        }
        async with self._snapshot() as found:
            await found.execute(
                "SELECT born, job.ref, document FROM job JOIN ticket ON ticket.nr = job.ticket"
                f" WHERE (born, job.ref) > (%(born)s, %(ref)s) {_and(where)} ORDER BY born, job.ref LIMIT %(limit)s",
                {"ticket": query.thread_id, "state": query.status and query.status.value, "prefix": query.id_prefix}
                | {"born": behind[0], "ref": behind[1], "limit": limit + 1},
            )
            rows = [((row["born"], row["ref"]), decode_run(row["document"])) for row in await found.fetchall()]
        runs, next_cursor = page_of(query, limit, rows)
        return RunPage(runs=runs, next_cursor=next_cursor)

    async def query_threads(
        self, query: ThreadQuery = ALL_THREADS, *, limit: int = LIMIT, cursor: str | None = None
    ) -> ThreadPage:
        """See `Queryable.query_threads`."""
        check_query(query)
        limit, behind = check_limit(limit), read_position(cursor, query)
        where = {
            "customer = %(customer)s": query.resource_id,
            "part_of = %(parent)s": query.parent_thread_id,
            "part_of IS NULL": query.roots or None,
            "starts_with(ref, %(prefix)s)": query.id_prefix,
            "touched < %(touched)s": behind,
        }
        async with self._snapshot() as found:
            await found.execute(
                "SELECT *, (SELECT count(*) FROM utterance WHERE ticket = ticket.nr) AS said FROM ticket"
                f" WHERE true {_and(where)} ORDER BY touched DESC LIMIT %(limit)s",
                {"customer": query.resource_id, "parent": query.parent_thread_id, "prefix": query.id_prefix}
                | {"touched": behind and behind[0], "limit": limit + 1},
            )
            rows = [((row["touched"], row["ref"]), _thread(row, row["said"])) for row in await found.fetchall()]
        threads, next_cursor = page_of(query, limit, rows)
        return ThreadPage(threads=threads, next_cursor=next_cursor)

    @asynccontextmanager
    async def _snapshot(self) -> AsyncIterator[psycopg.AsyncCursor[DictRow]]:
        """Open a cursor whose statements all see one snapshot of the database."""
        async with self.pool.connection() as connection, connection.cursor(row_factory=dict_row) as cursor:
            await cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
            yield cursor


def _thread(row: Mapping[str, Any], said: int) -> Thread:
    return Thread(
        thread_id=row["ref"],
        version=said,
        parent_thread_id=row["part_of"],
        latest_run_id=row["last_job"],
        active_run_id=row["running_job"],
        open_run_id=row["unfinished_job"],
        metadata=decode_metadata(row["details"]) if row["details"] is not None else ThreadMetadata(),
    )


def _ticket(change: ThreadChange, before: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the ticket's row after the change; `project` applies the rules for runs and parents."""
    thread = change.project(_thread(before, 0) if before else Thread(thread_id=change.thread_id))
    details = change.metadata if change.metadata is not None or before is None else before["details"]
    return {
        "ref": thread.thread_id,
        "part_of": thread.parent_thread_id,
        "customer": thread.metadata.resource_id,
        "details": details,
        "scratchpad": change.state,
        "last": thread.latest_run_id,
        "running": thread.active_run_id,
        "unfinished": thread.open_run_id,
    }


def _job(ref: str, run_id: str, document: bytes) -> dict[str, Any]:
    return {"ref": ref, "job": run_id, "state": decode_run(document).status.value, "document": document}


def _speaker(body: bytes) -> str | None:
    """Return the message's role, for the app's own reports."""
    message = decode_message(body)
    role = message.get("role") if isinstance(message, dict) else None
    return role if role in ("user", "assistant", "system", "tool") else None


def _and(conditions: Mapping[str, object]) -> str:
    return "".join(f" AND {text}" for text, wanted in conditions.items() if wanted is not None)
