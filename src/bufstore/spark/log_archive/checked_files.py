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


def write_by_date(
    rows: DataFrame, folder: str, read: Callable[[], DataFrame], hashed: tuple[str, ...]
) -> tuple[Totals, int]:
    """Write rows by their column `date`; `read` reads them back. Returns their totals, and when the newest was stored.

    The time is in microseconds of Unix time; 0: there are no rows. Raises DataLoss when the files do not hold what was
    written to them.
    """
    from pyspark.sql import Observation
    from pyspark.sql import functions as F

    observed, newest = Observation(), F.unix_micros(F.max("stored_at")).alias("newest")
    rows.observe(observed, *total_columns(*hashed), newest).write.mode("error").partitionBy("date").parquet(folder)
    totals, written = Totals.of(observed.get), read().agg(*total_columns(*hashed)).first()
    if written is None or Totals.of(written) != totals:
        raise DataLoss(f"{folder} does not hold what was written to it; nothing was recorded: do it again")
    return totals, int(observed.get["newest"] or 0)
