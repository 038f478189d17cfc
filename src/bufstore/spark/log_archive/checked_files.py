"""Files of an archive whose contents are checked: when they are written, and when somebody reads them later."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from bufstore.errors import DataLoss

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


class Totals(NamedTuple):
    """How many rows there are, and the sum of a hash over each, as a hexadecimal number: in whatever order they are."""

    rows: int = 0
    checksum: str = f"{0:032x}"

    @classmethod
    def of(cls, found: Any) -> Totals:
        """Return the totals in a row with `total_columns`."""
        return cls(int(found["count"]), f"{int(found['checksum'] or 0) & ((1 << 128) - 1):032x}")


def total_columns(*hashed: str) -> tuple[Column, Column]:
    """Return the columns to aggregate for `Totals.of`; `hashed`: the columns that the checksum covers."""
    from pyspark.sql import functions as F

    # A sum of decimals does not overflow, and does not depend on the order.
    checksum = F.sum(F.xxhash64(*hashed).cast("decimal(38,0)"))
    return F.count("*").alias("count"), checksum.alias("checksum")


class Written(NamedTuple):
    """What was written. Times are in microseconds of Unix time; 0: there are no such rows."""

    totals: Totals
    #: When the newest was stored, and the newest of those that were asked for.
    newest_us: int
    newest_of_some_us: int


def write_by_date(
    rows: DataFrame,
    folder: str,
    read: Callable[[], DataFrame],
    hashed: tuple[str, ...],
    stored_at_of_some: Column | None = None,
) -> Written:
    """Write rows by their column `date`; `read` reads them back. Returns what was written.

    `stored_at_of_some`: null for other rows. Raises DataLoss when the files do not hold what was written to them.
    """
    from pyspark.sql import Observation
    from pyspark.sql import functions as F

    observed, newest = Observation(), F.unix_micros(F.max("stored_at")).alias("newest")
    some = F.lit(None).cast("timestamp_ltz") if stored_at_of_some is None else stored_at_of_some
    newest_of_some = F.unix_micros(F.max(some)).alias("newest_of_some")
    watched = rows.observe(observed, *total_columns(*hashed), newest, newest_of_some)
    watched.write.mode("error").partitionBy("date").parquet(folder)
    totals, written = Totals.of(observed.get), read().agg(*total_columns(*hashed)).first()
    if written is None or Totals.of(written) != totals:
        raise DataLoss(f"{folder} does not hold what was written to it; nothing was recorded: do it again")
    return Written(totals, int(observed.get["newest"] or 0), int(observed.get["newest_of_some"] or 0))
