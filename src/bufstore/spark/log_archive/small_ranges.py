"""Makes one range of many small ranges of an archive, so that what a restore lists depends on how much there is, not on
how often it was archived.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

import msgspec

from bufstore.errors import DataLoss
from bufstore.spark.job_description import described
from bufstore.spark.log_archive.manifests import (
    VERSION,
    Manifest,
    check_ranges,
    expired,
    manifests_of,
    overlapping,
    write_manifest,
    write_range,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: A range of this many messages is not merged with others any more. A message is a group of at most 256 KiB.
RANGE_MESSAGES = 100_000
_MESSAGES_A_FILE = 2_000


def to_merge(manifests: Sequence[Manifest], messages: int) -> list[list[Manifest]]:
    """Return runs of neighbours that each hold fewer than `messages`; a run becomes one range of at most so many."""
    found: list[list[Manifest]] = []
    run: list[Manifest] = []
    for m in sorted(manifests, key=lambda m: (m.start, m.end)):
        if m.version != VERSION or m.count >= messages:
            continue
        full = sum(other.count for other in run) + m.count > messages
        if run and (full or _log_of(run[0]) != _log_of(m) or m.start > max(other.end for other in run)):
            found.append(run)
            run = []
        run.append(m)
    return [run for run in [*found, run] if len(run) > 1]


def removable(
    manifests: Sequence[Manifest], settled_us: int, before_us: int = 0, tabulated: int | None = None
) -> list[Manifest]:
    """Return the ranges of which others were made before `settled_us`, and those whose messages were all stored before
    `before_us`, in the order in which to remove them. Times are in microseconds of Unix time.

    `tabulated`: the sequence before which everything is in the table, which needs what is behind; None: there is none.
    """
    merged = {name for m in manifests if m.merged_us < settled_us for name in m.merged}
    # Ranges that an interrupted removal leaves must not count again: so a range that names others goes after those.
    replaced = sorted((m for m in manifests if m.name in merged), key=lambda m: m.merged_us)
    # Old ranges that do not count go, too: they would count again without the range that was made of them.
    old = expired([m for m in manifests if m.name not in merged], before_us)
    old = [m for m in old if tabulated is None or m.end <= tabulated]
    # The groups that stay were stored after all that goes. Without the parts that they name, they have no entries.
    stay_from_us = max((m.newest_us for m in old), default=0)
    return [*replaced, *takewhile(lambda m: m.needed_until_us < stay_from_us or not m.newest_part_us, old)]


def merge_small(spark: SparkSession, path: str, messages: int) -> int:
    """Make one range of each run of small neighbours. Returns how many were made.

    You may stop and repeat it: a range without a manifest does not count, but the ranges that it was made of do.
    Raises DataLoss when one of them is not what its manifest says.
    """
    runs = to_merge(manifests_of(spark, path), messages)
    for run in runs:
        _merge(spark, path, run)
    return len(runs)


def _merge(spark: SparkSession, path: str, run: Sequence[Manifest]) -> None:
    count, checksum = sum(m.count for m in run), sum(int(m.checksum, 16) for m in run)
    found = msgspec.structs.replace(
        run[0],
        end=max(m.end for m in run),
        lanes=max(m.lanes for m in run),
        lane=max(m.lane for m in run),
        attempt=secrets.token_hex(8),
        read_us=max(m.read_us for m in run),
        parts_for_us=max(m.parts_for_us for m in run),
        merged=tuple(m.name for m in run),
        merged_us=time.time_ns() // 1000,
    )
    files = max(1, -(-count // _MESSAGES_A_FILE))
    messages = check_ranges(spark, path, run).coalesce(files)
    with described(messages, f"bufstore: merge {len(run)} ranges into {found.name}"):
        found = write_range(messages, path, found)
        if not overlapping(run) and (found.count, int(found.checksum, 16)) != (count, checksum % (1 << 128)):
            raise DataLoss(f"ranges/{found.name} is not what it was made of; nothing was recorded: do it again")
        write_manifest(spark, path, found)


def _log_of(m: Manifest) -> tuple[str, int, str, int]:
    return m.created, m.epoch, m.subject, m.partitions
