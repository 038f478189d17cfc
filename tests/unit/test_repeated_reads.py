"""Which reads of Postgres are repeated."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from psycopg import AsyncConnection, errors
from psycopg.pq import DiagnosticField

from bufstore import StoreUnavailable
from bufstore.postgres.connection.errors import map_errors
from bufstore.postgres.connection.pool import Pool
from bufstore.postgres.connection.statements import Statements


class RefusingPool:
    """Lends, after a pooler has said this so many times in place of a session."""

    def __init__(self, words: str, times: int) -> None:
        self.left, self.words = times, words

    @asynccontextmanager
    async def lend(self, timeout_s: float, away_s: float | None) -> AsyncIterator[AsyncConnection[Any]]:
        with map_errors():
            if self.left:
                self.left -= 1
                said = {DiagnosticField.MESSAGE_PRIMARY: self.words.encode()}
                raise errors.ProtocolViolation(self.words, info=cast(Any, said))
            yield cast(AsyncConnection[Any], None)


@pytest.mark.parametrize("words", ["query_wait_timeout", "server login has been failing, try again later"])
async def test_a_read_that_a_pooler_had_no_session_for_is_repeated_once(words: str) -> None:
    """Regression: it was raised at once, where a lost connection was not."""

    async def read(_: AsyncConnection[Any]) -> str:
        return "found"

    def statements(times: int) -> Statements:
        return Statements(cast(Pool, RefusingPool(words, times)), {}, 20)

    assert await statements(1).answered(read) == "found"
    with pytest.raises(StoreUnavailable, match=f"pooler .* says: {words}"):
        await statements(2).answered(read)
    with pytest.raises(StoreUnavailable, match=f"pooler .* says: {words}"):  # who asks why is told at once
        await statements(1).answered(read, 1.0)
