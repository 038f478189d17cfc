"""Of which of a store's logs an archive is."""

from __future__ import annotations

from typing import Any

import pytest

from bufstore import ConfigError, LogConfig
from bufstore.buffer.lanes import lane_logs
from bufstore.spark.log_archive.archived_lane import archived_log
from bufstore.spark.log_archive.manifests import VERSION, Manifest


def manifest(**given: Any) -> Manifest:
    known = {"version": VERSION, "stream": "LOG", "created": "then", "epoch": 0, "subject": "log", "partitions": 8}
    return Manifest(**(known | {"start": 1, "end": 5, "count": 4, "checksum": ""} | given))


ONE, TWO = LogConfig(stream="LOG", bucket="hot"), LogConfig(stream="LOG", bucket="hot", lanes=2)


def found(manifests: list[Manifest], first: LogConfig | None) -> LogConfig:
    return archived_log(manifests, "LOG", "hot", first)


def test_an_archive_says_its_lane() -> None:
    second = lane_logs(TWO)[1]
    assert found([manifest(lanes=2, lane=1)], TWO) == found([manifest(lanes=2, lane=1)], None) == second
    assert found([manifest(lanes=2)], TWO) == found([manifest(lanes=2)], None) == TWO
    assert found([manifest(lanes=1)], ONE) == found([manifest(lanes=1)], None) == ONE
    assert found([manifest(), manifest(lanes=2, lane=1, end=9)], TWO) == second, "what earlier releases wrote agrees"


def test_of_an_archive_that_does_not_say_its_lane_the_stream_does() -> None:
    assert found([manifest(stream="LOG-1")], TWO) == lane_logs(TWO)[1]
    assert found([manifest()], TWO) == TWO
    assert found([manifest(stream="another")], ONE) == found([manifest(stream="another")], None) == ONE
    with pytest.raises(ConfigError, match="does not say which of the store's lanes"):
        found([manifest(stream="another")], TWO)
    with pytest.raises(ConfigError, match="seems to be of one of several lanes"):
        found([manifest(stream="LOG-1")], None)


def test_a_log_that_has_no_lanes_may_have_other_partitions() -> None:
    assert found([manifest(lanes=1, partitions=16)], ONE) == ONE
    gone = found([manifest(lanes=1, partitions=16)], None)
    assert gone.partitions == 16


@pytest.mark.parametrize(
    ("given", "first"),
    [
        ([manifest(lanes=2, lane=1)], ONE),
        ([manifest(lanes=1)], TWO),
        ([manifest(lanes=3, lane=1)], TWO),
        ([manifest(lanes=2, lane=1, partitions=32)], TWO),
        ([manifest(lanes=2), manifest(lanes=2, lane=1)], TWO),
    ],
)
def test_an_archive_of_another_layout_is_refused(given: list[Manifest], first: LogConfig) -> None:
    with pytest.raises(ConfigError, match=r"other lanes: restore into the logs|several lanes"):
        found(given, first)


def test_a_job_names_the_first_lanes_stream() -> None:
    with pytest.raises(ConfigError, match="name the first one's stream"):
        found([manifest(lanes=2, lane=1)], lane_logs(TWO)[1])
