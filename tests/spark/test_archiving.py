"""No entry is lost when archives are written at the same time, die half-way, overlap, or are of an earlier version."""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bufstore import BufferConfig, ConfigDrift, ConfigError, LogFull, LogUnavailable, StoreUnavailable
from bufstore.buffer.entry import Item
from bufstore.buffer.groups.sequencer import Sequencer
from bufstore.buffer.places import first_place
from bufstore.buffer.subjects import Subjects, first_sequence
from bufstore.embedded import Servers
from bufstore.langgraph import AsyncBufferedSaver
from bufstore.nats.ranges import LogReader
from bufstore.postgres.ledger.ledger import PostgresLedger
from bufstore.spark import ArchiveOvertaken, DataLoss, archive, compact, drain, expire, restore, tabulate
from bufstore.spark.log_archive import (
    archive_job,
    archived_entries,
    into_log,
    manifests,
    portions,
    restore_job,
    small_ranges,
)
from bufstore.spark.log_archive.manifests import (
    _LISTING_TASKS,
    Manifest,
    check_ranges,
    manifests_of,
    texts_of,
    write_text,
)
from bufstore.spark.source.threadlog_format import ThreadLogSource
from bufstore.threads.memory_store import MemoryThreadStore
from bufstore.threads.repairing import repair
from conftest import Deployment
from helpers import eventually, fresh, run_of, said
from spark.jobs import held, in_postgres, prepared, purge, read_options, where, write, write_together
from thorough import seldom


async def archived(deployment: Deployment) -> int:
    """Return the position up to which flushers may purge."""
    ledger = PostgresLedger(deployment.servers.postgres.dsn, MemoryThreadStore(), schema=deployment.name)
    await ledger.open()
    try:
        return await ledger.archived()
    finally:
        await ledger.aclose()


async def come_back(spark: Any, deployment: Deployment, path: Path, threads: list[str]) -> Any:
    """Restore the archive into an empty Postgres, and return the threads' messages."""
    elsewhere = Deployment(deployment.servers)
    report = await asyncio.to_thread(restore, spark, str(path), where(elsewhere))
    assert report.refused == 0, report.reasons
    return await in_postgres(elsewhere, threads)


def jobs_of_a_check(spark: Any, path: str, manifests: list[Manifest]) -> int:
    """Return how many jobs of Spark it takes to compare ranges with their manifests."""
    context, group = spark.sparkContext, secrets.token_hex(4)
    context.setJobGroup(group, "check")
    check_ranges(spark, path, manifests)
    found = len(jobs_of(spark, group))
    context.setLocalProperty("spark.jobGroup.id", None)
    return found


def jobs_of(spark: Any, group: str) -> list[Any]:
    """Return the jobs of a group, all that have run."""
    spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()  # the tracker hears of jobs from there
    tracker = spark.sparkContext.statusTracker()
    return [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(group)]


@pytest.mark.long  # several archives, one of them delayed
@pytest.mark.parametrize(("before", "merged"), [(0, False), (4, False), (4, True)])
async def test_a_run_that_is_overtaken_takes_nothing_from_the_one_that_was_faster(
    spark: Any, deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, merged: bool
) -> None:
    """Regression: if it was not the first of its archive, it ended with an error of Spark's, as if there was a loss.

    So did it later, if the faster one's range was merged with others meanwhile.
    """
    deployment.verified = False
    thread, path = fresh(), tmp_path / "archive"
    if before:
        await write(deployment, [thread], range(before))
        await asyncio.to_thread(archive, spark, where(deployment), str(path))
    await write(deployment, [thread], range(before, 10))
    async with deployment.store() as store:
        await store.force_flush_all()
    read = archive_job._read

    def overtaken(*args: Any, **kwargs: Any) -> Any:
        """Another run archives all of it before this run reads, and the entries are purged."""
        monkeypatch.setattr(archive_job, "_read", read)
        report = archive(spark, where(deployment), str(path))
        assert report.count == 10 - before
        assert small_ranges.merge_small(spark, str(path), 1000 if merged else 0) == merged
        asyncio.run(purge(deployment, report.end - 1))
        return read(*args, **kwargs)

    monkeypatch.setattr(archive_job, "_read", overtaken)
    with pytest.raises(ArchiveOvertaken, match="Nothing is lost"):
        await asyncio.to_thread(archive, spark, where(deployment), str(path))
    await write(deployment, [thread], range(10, 12))
    report = await asyncio.to_thread(archive, spark, where(deployment), str(path))
    assert report.count == 2
    assert await come_back(spark, deployment, path, [thread]) == {thread: list(range(12))}


@pytest.mark.long
async def test_a_restore_into_a_log_that_is_full_says_so(
    spark: Any, deployment: Deployment, deploy: Callable[..., Deployment], tmp_path: Path
) -> None:
    """Regression: it raised an error of Spark's, with the one of ours in a traceback of several."""
    threads, path, full = [fresh() for _ in range(4)], tmp_path / "archive", deploy(max_bytes=1 << 20)
    full.verified = False
    async with deployment.store(flusher=False) as store:
        for thread in threads:
            await store.checkpoint(thread, [said(0) | {"more": secrets.token_hex(200_000)}], run_of(thread))
    await asyncio.to_thread(archive, spark, where(deployment), str(path))
    await prepared(full)
    with pytest.raises(LogFull, match="is full"):
        await asyncio.to_thread(restore, spark, str(path), where(full), into="log")


@pytest.mark.long  # servers of its own
async def test_an_archive_whose_log_goes_away_says_so(
    spark: Any, own_servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it raised an error of Spark's, unless the log was away when the run began."""
    deployment, path = Deployment(own_servers), str(tmp_path / "archive")
    deployment.verified = False
    await write(deployment, [fresh()], range(2))
    begun = archive_job._begun

    async def then_away(*arguments: Any) -> None:
        await begun(*arguments)
        own_servers.nats.stop()

    monkeypatch.setattr(archive_job, "_begun", then_away)
    monkeypatch.setattr(archive_job, "messages_from", partial(archive_job.messages_from, outageTimeout=1))
    with pytest.raises(LogUnavailable):
        await asyncio.to_thread(archive, spark, where(deployment), path)


async def test_what_is_purged_before_it_is_archived_is_a_loss_by_that_name(
    spark: Any, deployment: Deployment, tmp_path: Path
) -> None:
    """Regression: the error was one of Spark's, with the loss somewhere in its 200 lines."""
    deployment.verified = False
    thread, path = fresh(), tmp_path / "archive"
    await write(deployment, [thread], range(2))
    first = await asyncio.to_thread(archive, spark, where(deployment), str(path))
    await write(deployment, [thread], range(2, 6))
    async with deployment.store() as store:
        await store.force_flush_all()
    await purge(deployment, first.end + 2)
    with pytest.raises(DataLoss, match=rf"the log begins at .*start={first.end}"):
        await asyncio.to_thread(archive, spark, where(deployment), str(path))
    for start, says in ((first.end + 1, f"Give start={first.end}"), (-5, "a sequence of the stream")):
        with pytest.raises(ConfigError, match=says):
            await asyncio.to_thread(archive, spark, where(deployment), str(path), start=start)
    for job, given in ((archive, (where(deployment), str(path))), (restore, (str(path), where(deployment)))):
        with pytest.raises(ConfigError, match="at least 1"):
            await asyncio.to_thread(job, spark, *given, tasks=0)
    with pytest.raises(ConfigError, match="a pattern"):
        await asyncio.to_thread(archive, spark, where(deployment), f"{path}[1]")
    rest = await asyncio.to_thread(archive, spark, where(deployment), str(path), start=first.end)
    assert rest.count == 2
    assert (await asyncio.to_thread(archive, spark, where(deployment), str(path))).count == 0


async def test_an_erasure_knows_of_a_run_that_died_and_of_one_that_is_on_its_way(
    spark: Any, deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the erasure said that no archive had the content, which such a run had read already."""
    thread, path = fresh(), tmp_path / "archive"
    await write(deployment, [thread], range(3))

    def dies(*_: Any) -> None:
        raise RuntimeError("the machine is gone")

    monkeypatch.setattr(archive_job, "write_manifest", dies)
    with pytest.raises(RuntimeError):
        await asyncio.to_thread(archive, spark, where(deployment), str(path))
    await deployment.change(failover_window_s=1.0)  # only now, because a write may then take half a second only
    async with deployment.store() as store:
        erased = await store.erase(thread)
    assert (erased.found, erased.archived_below > 0) == (True, True)
    assert await archived(deployment) == 0, "nothing may be purged for a run that died"


@pytest.mark.long  # many folders
async def test_folders_are_listed_by_as_many_tasks_as_there_are_cores(spark: Any, tmp_path: Path) -> None:
    """Above a threshold Spark would start one task per folder, and an archive has many folders."""
    folders, threshold = 9, "spark.sql.sources.parallelPartitionDiscovery.threshold"
    for n in range(folders):
        folder = tmp_path / "manifests" / str(n)
        folder.mkdir(parents=True)
        (folder / "part").write_text(f"{n}\n")

    def listed() -> tuple[list[str], int]:
        context, group = spark.sparkContext, secrets.token_hex(4)
        context.setJobGroup(group, "list")
        texts = texts_of(spark, str(tmp_path / "manifests"))
        jobs = jobs_of(spark, group)
        context.setLocalProperty("spark.jobGroup.id", None)
        stages = [context.statusTracker().getStageInfo(stage) for job in jobs for stage in job.stageIds]
        return texts, max(stage.numTasks for stage in stages)

    before = spark.conf.get(threshold), spark.conf.get(_LISTING_TASKS)
    spark.conf.set(threshold, "1")
    try:
        texts, tasks = await asyncio.to_thread(listed)
    finally:
        spark.conf.set(threshold, before[0])
    assert sorted(texts) == [str(n) for n in range(folders)]
    assert tasks <= spark.sparkContext.defaultParallelism
    assert spark.conf.get(_LISTING_TASKS) == before[1]


async def test_manifests_that_expire_while_they_are_read_hinder_nobody_and_hide_no_damage(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: an archive, say, ended with an error of Spark's beside an `expire`."""
    listing, going = manifests.listing, list[str]()

    @contextmanager
    def then_one_goes(spark: Any) -> Iterator[None]:
        with listing(spark):
            yield
        if going:
            shutil.rmtree(tmp_path / going.pop())

    def texts(*expiring: str) -> list[str]:
        for name in expiring:
            write_text(spark, str(tmp_path / name), name)
        going.extend(expiring)
        return texts_of(spark, str(tmp_path))

    monkeypatch.setattr(manifests, "listing", then_one_goes)
    write_text(spark, str(tmp_path / "stays"), "stays")
    assert await asyncio.to_thread(texts, "one", "another") == ["stays"]
    next((tmp_path / "stays").glob("part-*")).write_text("other")  # which its checksum shows
    with pytest.raises(Exception, match="Checksum"):
        await asyncio.to_thread(texts, "one", "another")
    going.append("stays")  # all there is, which no `expire` removes
    with pytest.raises(Exception, match="Path does not exist"):
        await asyncio.to_thread(texts)


@pytest.mark.long  # several archives and restores
async def test_ranges_that_overlap_or_hold_each_other_come_back_once(
    spark: Any, deployment: Deployment, tmp_path: Path
) -> None:
    threads, path = [fresh() for _ in range(3)], str(tmp_path / "archive")
    await write(deployment, threads, range(3))
    first = await asyncio.to_thread(archive, spark, where(deployment), path)
    await asyncio.to_thread(archive, spark, where(deployment), path, start=first.start + 2)  # inside the first
    await write(deployment, threads, range(3, 5))
    await asyncio.to_thread(archive, spark, where(deployment), path, start=first.end - 3)  # overlaps the first
    await write(deployment, threads, range(5, 6))
    last = await asyncio.to_thread(archive, spark, where(deployment), path)
    assert last.count == 3, "it goes on behind the furthest"
    manifests = manifests_of(spark, path)
    assert len(manifests) == 4
    few, many = [await asyncio.to_thread(jobs_of_a_check, spark, path, some) for some in (manifests[:1], manifests)]
    assert few == many, "however many ranges there are"
    assert await come_back(spark, deployment, tmp_path / "archive", threads) == {t: list(range(6)) for t in threads}


@pytest.mark.long  # several archives and restores
async def test_small_ranges_become_one_and_come_back_as_they_were(
    spark: Any, deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds when a merge dies, two merge at once, one archives meanwhile, or the replaced ranges are removed."""
    several, big, path = [fresh() for _ in range(3)], fresh(), tmp_path / "archive"
    archived_ = partial(asyncio.to_thread, archive, spark, where(deployment), str(path))
    merged = partial(asyncio.to_thread, compact, spark, str(path))
    await write(deployment, several, range(2))
    first = await archived_()
    await archived_(start=first.end - 1)  # overlaps the first
    async with deployment.store(flusher=False) as store:
        await store.checkpoint(big, [{"n": 0, "text": secrets.token_hex(1_000_000)}], run_of(big))  # stored in parts
    await archived_()
    await write(deployment, several, range(2, 4))
    await archived_()
    with monkeypatch.context() as dies, pytest.raises(RuntimeError):
        dies.setattr(small_ranges, "write_manifest", failing)
        await merged()
    before = manifests_of(spark, str(path))
    assert len(before) == 4
    everything = {t: list(range(4)) for t in several} | {big: [0]}

    await asyncio.gather(merged(), merged())
    two = manifests_of(spark, str(path))
    assert [(m.start, m.end, m.count) for m in two] == [(first.start, before[-1].end, before[-1].end - first.start)] * 2
    assert await come_back(spark, deployment, path, [*several, big]) == everything
    assert (await merged()).ranges == 1, "these two are neighbours, too"
    assert len(manifests_of(spark, str(path))) == 1
    for part in (path / "ranges" / before[0].name).rglob("*.parquet"):
        part.write_bytes(b"changed")  # the replaced range no longer counts
    assert await come_back(spark, deployment, path, [*several, big]) == everything
    assert await asyncio.to_thread(expire, spark, str(path)) == 0, "somebody may be reading"
    assert await asyncio.to_thread(partial(expire, grace=timedelta(0)), spark, str(path)) == 4 + 2
    assert [m.merged for m in manifests_of(spark, str(path))] == [tuple(m.name for m in two)]
    assert await come_back(spark, deployment, path, [*several, big]) == everything

    await write(deployment, several, range(4, 6))
    assert (await archived_()).count == 6, "it goes on behind the merged one"
    for part in (path / "ranges" / manifests_of(spark, str(path))[-1].name).rglob("*.parquet"):
        part.unlink()
    with pytest.raises(DataLoss, match="was changed"):
        await merged()


def failing(*_: Any) -> None:
    raise RuntimeError("this process dies")


@pytest.mark.long
async def test_some_threads_come_back_as_they_were_at_a_time(
    spark: Any, deployment: Deployment, tmp_path: Path
) -> None:
    threads, path = [fresh() for _ in range(4)], str(tmp_path / "archive")
    await write_together(deployment, threads, range(3))
    await asyncio.to_thread(archive, spark, where(deployment), path)
    until = datetime.now(UTC)
    await write_together(deployment, threads, range(3, 5))
    await asyncio.to_thread(archive, spark, where(deployment), path)
    elsewhere = Deployment(deployment.servers)
    some = partial(restore, spark, path, where(elsewhere), threads=[*threads[:2], "mistyped"])
    report = await asyncio.to_thread(some, until=until)
    assert (report.threads, report.missing, report.applied, report.refused) == (2, 1, 6, 0)
    assert await in_postgres(elsewhere, threads[:2]) == {t: [0, 1, 2] for t in threads[:2]}
    assert await in_postgres(elsewhere, threads[2:]) == dict.fromkeys(threads[2:])
    report = await asyncio.to_thread(some)
    assert (report.threads, report.applied, report.present) == (2, 4, 6), "what came later goes on from there"
    with pytest.raises(ConfigError, match="offset"):
        await asyncio.to_thread(some, until=until.replace(tzinfo=None))


async def messages_of(deployment: Deployment) -> list[dict[str, Any]]:
    """Return the log's messages as an archive stores them."""
    options = read_options(deployment, form="messages", numPartitions=1)

    def read() -> list[dict[str, Any]]:
        source = ThreadLogSource(options)
        reader: Any = source.reader(source.schema())
        return [row for p in reader.partitions() for batch in reader.read(p) for row in batch.to_pylist()]

    return await asyncio.to_thread(read)


async def rows_by_thread(deployment: Deployment, threads: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Return each thread's entries as a task of a restore gets them."""
    subjects = Subjects(deployment.log.subject, deployment.log.partitions)
    rows = [row for m in await messages_of(deployment) for row in archived_entries._rows(subjects, m)]
    return {
        t: [row | {"number": None, "part": None} for row in rows if row["subject"] == subjects.of(t)] for t in threads
    }


def items_of(of_thread: dict[str, list[dict[str, Any]]]) -> Iterator[tuple[str, Iterator[Item]]]:
    for thread_id, rows in of_thread.items():
        yield thread_id, (item for item, _ in archived_entries.items_of_rows(thread_id, iter(rows)))


@pytest.mark.parametrize("lost", [None, 1, 4])
async def test_a_thread_that_is_restored_in_portions_is_as_it_was(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, lost: int | None
) -> None:
    """No entry behind a lost one is applied, whichever portion the lost one is in."""
    monkeypatch.setattr(portions, "ENTRIES_MAX", 3)
    threads = sorted([fresh(), fresh()])
    await write(deployment, threads, range(8))
    of_thread = await rows_by_thread(deployment, threads)
    assert [len(found) for found in of_thread.values()] == [8, 8]
    if lost is not None:
        del of_thread[threads[0]][lost]
    other = Deployment(deployment.servers)
    elsewhere = where(other)
    stays = 8 if lost is None else lost
    for dry_run, present in ((True, 0), (False, 0), (False, stays + 8)):
        async with restore_job._restoring(elsewhere, "postgres", other.log, dry_run=dry_run) as restoring:
            await restoring.setup(1, None)
        counts = await restore_job._restore(elsewhere, "postgres", other.log, items_of(of_thread), dry_run=dry_run)
        applied = 0 if present else stays + 8
        refused = 0 if lost is None else 7 - lost
        assert (counts.threads, counts.applied, counts.present, counts.refused) == (2, applied, present, refused)


@pytest.mark.parametrize("faster", [{0: 2, 3: 6}, *seldom({0: 8}, {3: 8}, {0: 5}, {3: 5})])
async def test_a_restore_into_a_log_tells_its_other_attempt_from_somebody_else(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, faster: dict[int, int]
) -> None:
    """Another attempt, of a task or of a killed run, has already restored a part before one of the writes.

    Entries of any other writer stop the thread.
    """
    thread, other = fresh(), fresh()
    await write(deployment, [thread, other], range(8))
    of_thread = await rows_by_thread(deployment, [thread, other])
    elsewhere = Deployment(deployment.servers)
    await prepared(elsewhere)
    monkeypatch.setattr(into_log, "_UNIT_BYTES", 1)
    submit = Sequencer.submit

    async def restored(of: str, count: int = 8) -> tuple[int, int, int]:
        items = items_of({of: of_thread[of][:count]})
        found = await restore_job._restore(where(elsewhere), "log", elsewhere.log, items, dry_run=False)
        assert bool(found.reasons) == bool(found.refused), found.reasons
        return found.applied, found.present, found.refused

    async def overtaken(of: str, them: Callable[[int], Awaitable[Any]]) -> tuple[int, int, int]:
        writes = iter(range(8))

        async def slower(writer: Sequencer, unit: Any) -> int:
            number = next(writes)
            if number in faster:
                monkeypatch.setattr(Sequencer, "submit", submit)
                await them(faster[number])
                monkeypatch.setattr(Sequencer, "submit", slower)
            return await submit(writer, unit)

        monkeypatch.setattr(Sequencer, "submit", slower)
        found = await restored(of)
        monkeypatch.setattr(Sequencer, "submit", submit)
        return found

    theirs: list[int] = []

    async def another_attempt(count: int) -> None:
        applied, present, refused = await restored(thread, count)
        assert (applied + present, refused) == (count, 0)
        theirs.append(applied)

    assert await overtaken(thread, another_attempt) == (8 - sum(theirs), sum(theirs), 0)
    assert len(theirs) == len(faster)
    first = min(faster)
    assert await overtaken(other, lambda _: write(elsewhere, [other], range(99, 100))) == (first, 0, 8 - first)
    assert await held(elsewhere, [thread, other]) == {thread: list(range(8)), other: [*range(first), 99]}
    assert await restored(thread) == (0, 8, 0)


async def test_two_attempts_at_a_restore_into_a_log_at_once_write_each_entry_once(deployment: Deployment) -> None:
    threads = [fresh() for _ in range(40)]
    await write_together(deployment, threads, range(12))
    of_thread = await rows_by_thread(deployment, threads)
    elsewhere = Deployment(deployment.servers)
    await prepared(elsewhere)

    def attempt(backwards: bool) -> Any:
        rows = dict(reversed(of_thread.items())) if backwards else of_thread
        return restore_job._restore(where(elsewhere), "log", elsewhere.log, items_of(rows), dry_run=False)

    found = await asyncio.gather(attempt(False), attempt(True))
    assert sum(one.applied for one in found) == sum(one.present for one in found) == 480
    assert [one.refused for one in found] == [0, 0], found
    assert await held(elsewhere, threads) == {t: list(range(12)) for t in threads}


@pytest.mark.long
async def test_what_a_run_that_died_did_not_note_is_noted_by_the_next(
    spark: Any, deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full log gets no new entry, and nothing is purged before the archive's end is noted."""
    path = str(tmp_path / "archive")
    await write(deployment, [fresh()], range(3))
    note = archive_job._note

    async def away(*_: Any) -> None:
        raise StoreUnavailable("Postgres is away")

    monkeypatch.setattr(archive_job, "_note", away)
    with pytest.raises(StoreUnavailable):
        await asyncio.to_thread(archive, spark, where(deployment), path)
    monkeypatch.setattr(archive_job, "_note", note)
    assert await archived(deployment) == 0
    report = await asyncio.to_thread(archive, spark, where(deployment), path)
    assert report.count == 0
    assert report.end > 3
    assert await archived(deployment) == first_place(report.end)


def into_version_1(path: Path) -> None:
    """Rewrite the archive as version 1 had it: folders and manifests are named after ranges."""
    for folder in (path / "manifests").iterdir():
        (file,) = (f for f in folder.iterdir() if f.name.startswith("part-"))
        manifest = json.loads(file.read_text())
        attempt = manifest.pop("attempt")
        old = folder.name.removesuffix(f"-{attempt}")
        assert old != folder.name
        file.write_text(json.dumps(manifest | {"version": 1}) + "\n")
        (folder / f".{file.name}.crc").unlink()
        folder.rename(path / "manifests" / old)
        (path / "ranges" / folder.name).rename(path / "ranges" / old)


@pytest.mark.long
async def test_an_archive_of_an_earlier_version_is_gone_on_with(
    spark: Any, deployment: Deployment, tmp_path: Path
) -> None:
    threads, path = [fresh() for _ in range(3)], tmp_path / "archive"
    await write(deployment, threads, range(2))
    first = await asyncio.to_thread(archive, spark, where(deployment), str(path))
    into_version_1(path)
    assert (path / "ranges" / f"{first.start:020d}-{first.end:020d}").is_dir()
    await write(deployment, threads, range(2, 4))
    second = await asyncio.to_thread(archive, spark, where(deployment), str(path))
    assert (second.start, second.count) == (first.end, 6)
    assert await come_back(spark, deployment, path, threads) == {t: list(range(4)) for t in threads}


@pytest.mark.long  # several archives
async def test_two_streams_with_the_same_numbers_do_not_come_into_one_archive(
    spark: Any, deploy: Callable[..., Deployment], tmp_path: Path
) -> None:
    """Log and Postgres were made again, and the archive's folder is the old one. No entry may be skipped."""
    one, two, thread = deploy(), deploy(), fresh()
    await write(one, [thread], range(4))
    await write(two, [thread], range(10, 16))
    paths = [tmp_path / name for name in ("one", "two")]
    for deployment, path in zip((one, two), paths, strict=True):
        await asyncio.to_thread(archive, spark, where(deployment), str(path))
    for start in (None, 1):
        with pytest.raises(ConfigError, match="into another folder"):
            await asyncio.to_thread(archive, spark, where(two), str(paths[0]), start=start)
    for kind in ("manifests", "ranges"):  # as an earlier release allowed
        for folder in list((paths[1] / kind).iterdir()):
            folder.rename(paths[0] / kind / folder.name)
    with pytest.raises(DataLoss, match="two streams that have the same numbers"):
        await asyncio.to_thread(restore, spark, str(paths[0]), where(deploy()))
    with pytest.raises(DataLoss, match="two streams that have the same numbers"):
        await asyncio.to_thread(tabulate, spark, str(paths[0]))


@pytest.mark.long
async def test_who_says_where_to_go_on_takes_what_is_left(spark: Any, deployment: Deployment, tmp_path: Path) -> None:
    deployment.verified = False
    threads, path = [fresh() for _ in range(4)], str(tmp_path / "archive")
    await write(deployment, threads, range(2))
    first = await asyncio.to_thread(archive, spark, where(deployment), path)
    await write(deployment, threads, range(2, 6))
    await purge(deployment, first.end + 6)
    with pytest.raises(Exception, match="begins at message"):
        await asyncio.to_thread(archive, spark, where(deployment), path)
    second = await asyncio.to_thread(archive, spark, where(deployment), path, start=first.end)
    assert (second.start, second.count) == (first.end, 10)
    assert await archived(deployment) == first_place(second.end)


async def test_an_archive_whose_folder_is_not_mounted_does_not_begin_anew(
    spark: Any, deployment: Deployment, tmp_path: Path
) -> None:
    deployment.verified = False
    threads, mounted, empty = [fresh() for _ in range(4)], tmp_path / "mounted", str(tmp_path / "empty")
    await write(deployment, threads, range(2))
    first = await asyncio.to_thread(archive, spark, where(deployment), str(mounted))
    await purge(deployment, first.end)
    await write(deployment, threads, range(2, 4))
    with pytest.raises(ConfigError, match=rf"is it mounted.*start={first.end}"):
        await asyncio.to_thread(archive, spark, where(deployment), empty)
    assert await archived(deployment) == first_place(first.end), "the flushers may purge no more"
    other = await asyncio.to_thread(archive, spark, where(deployment), empty, start=first.end)
    assert (other.start, other.count) == (first.end, 8)


async def test_a_drain_purges_nothing_that_is_not_archived(deploy: Callable[..., Deployment]) -> None:
    """Drains run when a log is full, and then flushed entries are not retained, but unarchived entries still are."""
    deployment = deploy(max_bytes=1 << 20, archive=True)
    deployment.verified = False
    threads = [fresh() for _ in range(32)]
    async with deployment.store(flusher=False) as store:
        for n in range(2):
            for thread in threads:
                message = said(n) | {"more": secrets.token_hex(6000)}  # random, so that it cannot be compressed
                await store.checkpoint_append(thread, [message], run_of(thread))
        assert (await store.statistics()).log_bytes > 0.7 * deployment.log.max_bytes
    await deployment.change(failover_window_s=1.0)  # only now, because a write may then take half a second only
    settings = where(deployment)
    reader = LogReader(settings.server, settings.stream)
    await reader.open()

    async def sequences() -> list[int]:
        log = await reader.look()
        found = reader.read(log.first, log.end, log.subjects.stored, headers_only=True)
        return [read.message.seq async for part in found for read in part]

    try:
        before = await sequences()
        async with await drain._store(settings, flusher=True) as draining:
            await draining.force_flush_all()
            await archive_job._note(settings, await reader.look(), before[32])

            async def purged() -> bool:
                return await sequences() == before[32:]

            await eventually(purged, 30)
    finally:
        await reader.aclose()


@pytest.mark.long  # two restores
@pytest.mark.parametrize("into", ["postgres", "log"])
async def test_threads_of_a_log_that_was_begun_anew_with_other_partitions_come_back_whole(
    spark: Any, deploy: Callable[..., Deployment], tmp_path: Path, into: Any
) -> None:
    """Regression: into a log came only what stood before the repair."""
    deployment, path, threads = deploy(partitions=4), str(tmp_path / "archive"), [fresh() for _ in range(4)]
    await write(deployment, threads, range(3))
    await asyncio.to_thread(archive, spark, where(deployment), path)
    async with deployment.store() as store:
        await store.force_flush_all()
        await store.buffer.session.stream.api(f"STREAM.DELETE.{deployment.log.stream}")
        deployment.verified = False
    nats, inner = deployment.servers.nats.url, deployment.inner()
    assert (await repair(inner, nats=nats, config=deployment.config(), apply=True)).done
    deployment.log = replace(deployment.log, partitions=8)
    await write(deployment, threads, range(3, 6))
    start = first_sequence(1)
    assert (await asyncio.to_thread(archive, spark, where(deployment), path, start=start)).count > 0
    elsewhere = Deployment(deployment.servers)
    if into == "log":
        await prepared(elsewhere)
    report = await asyncio.to_thread(restore, spark, path, where(elsewhere), into=into)
    assert (report.threads, report.applied, report.refused) == (4, 24, 0), report
    found = await (held if into == "log" else in_postgres)(elsewhere, threads)
    assert found == {t: list(range(6)) for t in threads}


async def test_a_log_that_is_not_of_threads_is_neither_archived_nor_restored_into(
    spark: Any, deployment: Deployment, tmp_path: Path
) -> None:
    """Regression: an archive of a LangGraph log looked like a backup, and could be restored nowhere."""
    path, servers, name = str(tmp_path / "archive"), deployment.servers, deployment.name
    await write(deployment, [fresh()], range(2))
    await asyncio.to_thread(archive, spark, where(deployment), path)
    log = replace(deployment.log, stream=f"{name}-lg", bucket=f"{name}-lg", subject=f"{name}-lg")
    schemas = {"schema": f"{name}_lg", "buffer_schema": f"{name}_lg_buffer"}
    of_langgraph = replace(where(deployment), stream=log.stream, bucket=log.bucket, schema=schemas["buffer_schema"])
    async with AsyncBufferedSaver.from_conn_string(
        servers.postgres.dsn, servers.nats.url, config=BufferConfig(log=log), **schemas
    ):
        for job in (archive, partial(restore, into="log")):
            given = (path, of_langgraph) if job is not archive else (of_langgraph, path)
            with pytest.raises(ConfigDrift, match="threads of messages"):
                await asyncio.to_thread(job, spark, *given)
    with pytest.raises(ConfigError, match=r"LogConfig\.archive"):
        async with AsyncBufferedSaver.from_conn_string(
            servers.postgres.dsn, servers.nats.url, config=BufferConfig(log=replace(log, archive=True)), **schemas
        ):
            pass
