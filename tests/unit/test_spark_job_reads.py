"""How the jobs of an archive read the log: where, from which position, and in how many tasks; without Spark."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from bufstore import NatsConfig
from bufstore.errors import DataLoss, NoLog
from bufstore.spark import Deployment
from bufstore.spark.log_archive import archive_job, tables_job
from bufstore.spark.log_archive.manifests import VERSION, Manifest
from bufstore.spark.source.options import ReadOptions, read_options

SERVER = NatsConfig(servers=("nats://one:4222", "nats://two:4222"), user="me", password="hush", domain="hub")
DEPLOYMENT = Deployment(nats=SERVER, postgres="postgresql://db/app", stream="mine")
RANGE = Manifest(
    version=VERSION, stream="mine", created="then", epoch=1, subject="thread", partitions=4, start=5, end=9, count=4,
    checksum="",
)  # fmt: skip


class Reading:
    """A session that only reads; `found` is the last read, as the source understands it."""

    def __init__(self) -> None:
        self.found: ReadOptions | None = None

    @property
    def read(self) -> Reading:
        return self

    def format(self, name: str) -> Reading:
        assert name == "threadlog"
        return self

    def options(self, **given: str) -> Reading:
        self.found = read_options(given)
        return self

    def load(self) -> Reading:
        return self

    def select(self, *_: str) -> Reading:
        return self


@pytest.fixture(params=[7, None])
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """The cluster's cores; None on Connect, which does not tell."""
    found: int | None = request.param
    monkeypatch.setattr(archive_job, "cores_of", lambda _: found)
    monkeypatch.setattr(tables_job, "messages_of", lambda _: SimpleNamespace(columns=["position"]))
    return found


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Return a function that sets when the log was made; None: there is no log."""

    def is_made(created: str | None) -> None:
        async def log_of(deployment: Deployment, reached: int) -> Any:
            assert deployment is DEPLOYMENT
            if created is None:
                raise NoLog("mine")
            return SimpleNamespace(created=created)

        monkeypatch.setattr(tables_job, "log_of", log_of)

    return is_made


def test_what_is_behind_an_archive_is_read_from_its_end_on(
    cores: int | None, log: Callable[[str | None], None]
) -> None:
    spark: Any = Reading()
    log("then")
    tables_job._log(spark, DEPLOYMENT, RANGE, 9)
    check(spark.found, cores, start="9", end=None)
    for created, error in (("later", DataLoss), (None, NoLog)):
        log(created)
        with pytest.raises(error):
            tables_job._log(spark, DEPLOYMENT, RANGE, 9)


@pytest.mark.parametrize(
    ("earliest", "given", "start"), [(True, False, "earliest"), (True, True, "5"), (False, False, "5")]
)
def test_a_range_is_read_whole_unless_its_start_was_given(
    cores: int | None, earliest: bool, given: bool, start: str
) -> None:
    spark: Any = Reading()
    archive_job._read(spark, DEPLOYMENT, RANGE, earliest=earliest, given=given, tasks=3)
    check(spark.found, cores, start=start, end="9", tasks=3, whole=not given)


def check(
    found: ReadOptions, cores: int | None, *, start: str, end: str | None, tasks: int | None = None, whole: bool = True
) -> None:
    assert (found.nats, found.stream, found.form) == (SERVER, "mine", "messages")
    assert (found.starting_position, found.ending_position, found.fail_on_data_loss) == (start, end, whole)
    assert (found.tasks, found.min_tasks) == (tasks, cores or ReadOptions.min_tasks)
