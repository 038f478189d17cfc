"""How much one statement of a flush, or one block of a COPY, takes at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from bufstore.langgraph.folded import Folded
from bufstore.langgraph.model import WriteRow, Writes
from bufstore.langgraph.postgres.columns import parameters
from bufstore.postgres.connection import arrays
from bufstore.threads.model import ThreadChange, encode_messages, encode_run
from bufstore.threads.postgres import copying
from bufstore.threads.postgres.columns import message_columns, run_columns
from helpers import run_of

THREAD_ID = "t" * 1024
N = 1000


def change() -> ThreadChange:
    runs = {f"r{n}": encode_run(run_of("t")) for n in range(N)}
    return ThreadChange(thread_id=THREAD_ID, keep=0, messages=encode_messages([1] * N), whole=True, runs=runs, saves=[])


def messages() -> Iterator[int]:
    return (sum(len(array.data) for array in columns) for columns in message_columns([change()]))


def runs() -> Iterator[int]:
    return (sum(len(array.data) for array in columns) for columns in run_columns([change()]))


def writes() -> Iterator[int]:
    rows = [WriteRow("", "c", f"t{n}", 0, "channel", "null", b"", "") for n in range(N)]
    return (sum(len(a.data) for a in columns) for _, columns in parameters([Folded(THREAD_ID, [Writes(rows)])]))


def blocks() -> Iterator[int]:
    return map(len, copying.copied([change()]))


@pytest.mark.parametrize("sizes", [messages, runs, writes, blocks])
def test_a_long_id_of_many_small_rows_counts(
    sizes: Callable[[], Iterator[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a statement had a thread's id once for each row and counted none, so Postgres took it no more."""
    most = 64 << 10
    monkeypatch.setattr(arrays, "STATEMENT_BYTES", most)
    monkeypatch.setattr(copying, "_BLOCK_BYTES", most)
    found = [*sizes()]
    assert max(found) < 1.1 * most
    assert sum(found) > N * len(THREAD_ID)
    assert len(found) < 2 * sum(found) / most, "no more of them than needed"
