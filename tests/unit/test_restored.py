"""Which answers count of a Postgres that may have been restored from a backup."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from bufstore.buffer.ports.ledger import Cursor
from bufstore.buffer.read.restored import Restored
from bufstore.errors import LogUnavailable, StoreUnavailable
from unit.fake_log import run

FLOOR = 100


class Postgres:
    """A ledger of two partitions, one of which lacks settled entries until it is flushed again."""

    def __init__(self) -> None:
        self.connections = self.changes_of_database = 1
        self.flushed = False
        self.looks = 0

    def take_over(self) -> None:
        """Let another database, or another run of the server, answer from now on, behind a new connection."""
        self.connections += 1
        self.changes_of_database += 1

    async def cursors(self) -> dict[int, Cursor]:
        self.looks += 1
        await asyncio.sleep(0.01)
        return {0: Cursor(0, 1, FLOOR, 7), 1: Cursor(1, 1, FLOOR if self.flushed else 50, 8)}

    async def answer(self) -> str:
        found = "new" if self.flushed else "old"
        await asyncio.sleep(0.01)
        return found


class Log:
    """A log that has an entry between the restored cursor and the floor."""

    generation_start, floor = 1, FLOOR

    async def identity(self, seq: int) -> Any:
        return None

    async def bounds(self) -> tuple[int, int]:
        return 1, FLOOR

    async def scan(self, above: int, **_: Any) -> Any:
        yield 1, SimpleNamespace(seq=above + 1)


def restored(postgres: Postgres, log: Log, monkeypatch: pytest.MonkeyPatch) -> Restored:
    async def fits(*_: Any) -> None:
        return None

    monkeypatch.setattr("bufstore.buffer.read.restored.mismatch", fits)
    monkeypatch.setattr("bufstore.buffer.read.restored.never_flushed", fits)
    return Restored(SimpleNamespace(log=log, ledger=postgres, subjects=SimpleNamespace(partitions=2)))  # type: ignore[arg-type]


def test_nothing_counts_until_it_is_flushed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        postgres = Postgres()
        counts = restored(postgres, Log(), monkeypatch)
        with pytest.raises(StoreUnavailable, match="flushed again"):
            await counts.counting(postgres.answer)
        postgres.flushed = True
        assert await counts.counting(postgres.answer) == "new"
        looks = postgres.looks
        assert await counts.counting(postgres.answer) == "new"
        assert postgres.looks == looks, "the same connections: nothing to ask"
        await counts.aclose()

    run(main())


@pytest.mark.parametrize("what", ["another database", "a higher floor"])
def test_an_answer_from_before_it_was_flushed_again_does_not_count(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: an answer from before the flush was shown as fresh, because the look came after the flush."""

    async def main() -> None:
        postgres, log = Postgres(), Log()
        log.floor = FLOOR if what == "another database" else 1
        counts = restored(postgres, log, monkeypatch)
        postgres.flushed = what == "another database"
        await counts.counting(postgres.answer)
        asked = 0

        async def meanwhile() -> str:
            nonlocal asked
            asked += 1
            found = await postgres.answer()
            if asked == 1:
                if what == "another database":
                    postgres.take_over()
                else:
                    log.floor = FLOOR
                postgres.flushed = True
            return found

        assert await counts.counting(meanwhile) == "new"
        assert asked == 2
        await asyncio.sleep(6)
        assert await counts.counting(meanwhile) == "new"
        assert asked == 3, "it is asked again for its cursors only"
        await counts.aclose()

    run(main())


def test_a_new_connection_to_the_same_database_spoils_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: while a pool grew, each question that waited in it was asked twice."""

    async def main() -> None:
        postgres = Postgres()
        counts = restored(postgres, Log(), monkeypatch)
        postgres.flushed = True
        await counts.counting(postgres.answer)
        asked, looks = 0, postgres.looks

        async def meanwhile() -> str:
            nonlocal asked
            asked += 1
            postgres.connections += asked <= 5
            return await postgres.answer()

        assert await asyncio.gather(*(counts.counting(meanwhile) for _ in range(5))) == ["new"] * 5
        assert asked == 5
        assert postgres.looks > looks, "it is compared again: its tables may be older ones"
        await counts.aclose()

    run(main())


def test_a_database_that_is_met_only_when_its_connection_is_used_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        postgres = Postgres()
        counts = restored(postgres, Log(), monkeypatch)
        postgres.flushed = True
        postgres.connections += 1  # a pool has made it beforehand
        await counts.counting(postgres.answer)
        postgres.changes_of_database, postgres.flushed = 2, False
        with pytest.raises(StoreUnavailable, match="flushed again"):
            await counts.counting(postgres.answer)
        await counts.aclose()

    run(main())


async def wrong(*_: Any) -> str | None:
    """Tell of a mismatch."""
    return "position 50 no longer holds the entry at the cursor"


def test_an_old_leader_does_not_tell_that_postgres_went_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: Postgres counted as away where a node that had been cut off told where the log ended before."""

    class Replicated(Log):
        async def barrier(self, timeout_s: float) -> int:
            return FLOOR + 1

        async def end(self, timeout_s: float) -> int:
            return self.ends

        async def scan(self, above: int, **_: Any) -> Any:
            yield 1, SimpleNamespace(seq=FLOOR)

        ends = FLOOR + 1

    async def old(log: Any, cursor: Cursor, reached: int = 0) -> str | None:
        return None if reached else "the log ends at 40"

    async def main() -> None:
        postgres, log = Postgres(), Replicated()
        counts = restored(postgres, log, monkeypatch)
        monkeypatch.setattr("bufstore.buffer.read.restored.mismatch", old)
        assert await counts.counting(postgres.answer) == "old"
        postgres.take_over()
        monkeypatch.setattr("bufstore.buffer.read.restored.mismatch", wrong)
        with pytest.raises(StoreUnavailable, match="position 50"):
            await counts.counting(postgres.answer)
        await asyncio.sleep(6)
        log.ends = 40
        with pytest.raises(LogUnavailable, match="no longer leads"):
            await counts.counting(postgres.answer)
        await counts.aclose()

    run(main())


def test_reads_of_a_postgres_that_went_back_too_far_store_a_proof_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each read stored one, and so filled the log until it was repaired."""

    class Counted(Log):
        proofs = 0

        async def barrier(self, timeout_s: float) -> int:
            self.proofs += 1
            return FLOOR + 1

        async def end(self, timeout_s: float) -> int:
            return FLOOR + 1

    async def main() -> None:
        postgres, log = Postgres(), Counted()
        counts = restored(postgres, log, monkeypatch)
        monkeypatch.setattr("bufstore.buffer.read.restored.mismatch", wrong)
        for times in (1, 2):
            for _ in range(20):
                with pytest.raises(StoreUnavailable, match="position 50"):
                    await counts.counting(postgres.answer)
            assert log.proofs == times
            await asyncio.sleep(6)
        await counts.aclose()

    run(main())


@pytest.mark.parametrize("how", ["another database", "a new connection", "an old connection, by a pooler"])
def test_an_answer_does_not_count_after_others_found_postgres_flushed_again(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer may take long: meanwhile others may have found that Postgres went back, then that it is complete."""

    async def main() -> None:
        postgres = Postgres()
        counts = restored(postgres, Log(), monkeypatch)
        postgres.flushed = True
        await counts.counting(postgres.answer)
        await asyncio.sleep(6)
        asked = 0

        async def meanwhile() -> str:
            nonlocal asked
            asked += 1
            if asked == 1:
                postgres.flushed = False
                postgres.connections += how != "an old connection, by a pooler"
                postgres.changes_of_database += how == "another database"
                found = await postgres.answer()
                with pytest.raises(StoreUnavailable, match="flushed again"):
                    await counts.counts_since(counts.era)
                postgres.flushed = True
                await counts.counts_since(counts.era)
                return found
            return await postgres.answer()

        assert await counts.counting(meanwhile) == "new"
        assert asked == 2
        await counts.aclose()

    run(main())


def test_a_connection_that_came_during_the_comparison_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reconnecting(Postgres):
        """A ledger that answers on the last connection of the complete Postgres, which is gone with the answer."""

        async def cursors(self) -> dict[int, Cursor]:
            found = await super().cursors()
            if self.looks == 1:
                self.take_over()
                self.flushed = False
            return found

    async def main() -> None:
        postgres = Reconnecting()
        counts = restored(postgres, Log(), monkeypatch)
        postgres.flushed = True
        with pytest.raises(StoreUnavailable, match="flushed again"):
            await counts.counting(postgres.answer)
        await counts.aclose()

    run(main())


@pytest.mark.parametrize("cursors", [{}, {0: Cursor(0, 1, FLOOR, 7)}])
def test_a_postgres_without_the_row_of_a_partition_lacks_what_the_log_has_of_it(
    cursors: dict[int, Cursor], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Rowless(Postgres):
        async def cursors(self) -> dict[int, Cursor]:
            return cursors

    class Other(Log):
        async def scan(self, above: int, **which: Any) -> Any:
            if which["partitions"] == [1]:
                yield 1, SimpleNamespace(seq=above + 1)

    async def main() -> None:
        postgres = Rowless()
        counts = restored(postgres, Other(), monkeypatch)
        with pytest.raises(StoreUnavailable, match="partition 1 was flushed"):
            await counts.counting(postgres.answer)
        await counts.aclose()

    run(main())


def test_an_empty_postgres_does_not_count_when_the_log_is_purged_past_all_of_it() -> None:
    class Empty(Postgres):
        async def cursors(self) -> dict[int, Cursor]:
            return {}

    class Purged(Log):
        async def end(self, timeout_s: float) -> int:
            return FLOOR

        async def erased(self) -> int:
            return 0

        async def purged_to(self) -> int:
            return FLOOR

        async def scan(self, above: int, **_: Any) -> Any:
            yield 1, SimpleNamespace(seq=FLOOR)

    async def main() -> None:
        postgres: Any = Empty()
        parts: Any = SimpleNamespace(log=Purged(), ledger=postgres, subjects=SimpleNamespace(partitions=2))
        counts = Restored(parts)
        with pytest.raises(StoreUnavailable, match="nothing of it was flushed"):
            await counts.counting(postgres.answer)
        await counts.aclose()

    run(main())


@pytest.mark.parametrize(("floor", "looks"), [(1, 0), (FLOOR, 1)])
def test_postgres_is_compared_once_before_the_first_question_and_not_for_the_next(
    floor: int, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing of the log is below the floor, there is nothing to ask for."""

    async def main() -> None:
        await asyncio.sleep(100)
        postgres, log, asked = Postgres(), Log(), 0
        postgres.flushed, log.floor = True, floor
        counts = restored(postgres, log, monkeypatch)

        async def ask() -> str:
            nonlocal asked
            asked += 1
            return await postgres.answer()

        for n in (1, 2):
            assert await counts.counting(ask) == "new"
            assert (asked, postgres.looks) == (n, looks)
        await counts.aclose()

    run(main())


def test_of_what_is_above_a_cursor_only_the_first_entry_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Idle(Log):
        """A log whose idle partition goes on above the floor."""

        read = 0

        async def scan(self, above: int, **_: Any) -> Any:
            for seq in range(FLOOR, 2 * FLOOR):
                self.read += 1
                yield 1, SimpleNamespace(seq=seq)

    async def main() -> None:
        postgres, log = Postgres(), Idle()
        counts = restored(postgres, log, monkeypatch)
        assert await counts.counting(postgres.answer) == "old"
        assert log.read == 1
        await counts.aclose()

    run(main())
