"""Checks, before and after a batch, which query may write under an app id, and whether a repeated batch is the same.

A repeated row is recognized by its number (docs/adr/0014), so new rows under old numbers would be dropped silently. Two
things lead to such rows: a query with a new checkpoint folder begins at batch 0 again, and a source that cannot be
replayed gives other rows for a batch. Both are found here: each task notes a sum over its rows before it writes one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from bufstore.errors import ConfigError, InvalidRecord, StoreUnavailable
from bufstore.log_lines import LogLines
from bufstore.spark.config import SinkConfig
from bufstore.spark.outage import Patience
from bufstore.spark.process_loop import loop
from bufstore.spark.sink.parts import differ, sum_of
from bufstore.spark.sink.row_writer import RowCounts
from bufstore.spark.sink.spark_ledger import Holder, Query, SparkLedger

_log = LogLines(__name__)

T = TypeVar("T")

#: How long one try to reach Postgres may take, in seconds.
_TRY_S = 5.0
#: The same, when the batch need not wait for Postgres.
_SHORT_S = 2.0
#: The same, when Postgres did not answer when the batch began.
_AWAY_S = 0.5
_ANEW = (
    "If this is impossible, begin anew: with a new checkpoint folder, an app id of its own, and behind what is written."
)


def check_holder(holder: Holder, app_id: str, query: Query, batch_id: int) -> None:
    """Raise ConfigError, with both ways out, when another query has the app id, or a later batch was begun."""
    if query.query_id and holder.query_id == query.query_id and batch_id < holder.batch_id:
        raise _older(app_id, holder.batch_id, batch_id)
    if holder.query_id != query.query_id or batch_id < holder.batch_id:
        raise ConfigError(
            f"app id {app_id!r} has written batch {holder.batch_id} of query "
            f"{holder.query_id or '(unknown)'}, and this is batch {batch_id} of query {query.query_id or '(unknown)'}. "
            "Its rows would be taken for repeats. Either continue with the checkpoint folder of that query, or give "
            "this query an app id of its own."
        )


def _older(app_id: str, at: int, batch_id: int) -> ConfigError:
    return ConfigError(
        f"app id {app_id!r} has written batch {at} of this query, and this is batch {batch_id}: the query's checkpoint "
        "folder is older than that, as after a backup was put back, or another query runs on a copy of it. Rows would "
        f"be taken for repeats, or be written twice under another app id. Continue with the newest folder. {_ANEW}"
    )


def check_rows(holder: Holder, app_id: str, present: Mapping[int, int], of: int) -> None:
    """Raise ConfigError when the batch came before with other rows. `present`: the sums of its `of` parts now."""
    if holder.planned in (None, sum_of(present.values())) and not differ(holder.parts, present, of):
        return
    # A query that Spark names has its old checkpoint folder, and so no other app id helps it: see `AppId.begin`.
    way_out = _ANEW if holder.query_id else "If the query has a new checkpoint folder, give it an app id of its own."
    if holder.done:
        raise ConfigError(
            f"batch {holder.batch_id} of app id {app_id!r} was done before with other rows: its new rows would be "
            "taken for repeats. Either the source cannot be replayed (cache or copy it), or the checkpoint folder is "
            f"not the one with which the batch was done (go on with that one). {way_out}"
        )
    raise ConfigError(
        f"batch {holder.batch_id} of app id {app_id!r} was begun before with other rows and not finished, so some of "
        "those may be written, and new rows would be taken for repeats of them. Give the batch its earlier rows (if "
        f"bad rows ended it, it will end once more, and then accept corrected rows). {way_out}"
    )


class AppId:
    """The app id of one sink, in the process that runs its batches; needs Postgres for the first batch.

    Later batches of the same run go on without Postgres: what this process knows of the app id is still true.
    """

    def __init__(self, config: SinkConfig) -> None:
        self._config = config
        #: The query in its present run, and what is known of its last batch (None: nothing).
        self._query = Query()
        self._holder: Holder | None = None
        #: Whether nobody waits for the present batch any longer.
        self._stopped: Callable[[], bool] = lambda: False
        #: The seconds that the present batch has waited for Postgres here.
        self.waited_s = 0.0
        #: Whether rows of the present batch may have been tried before: not if it follows a batch of the same run.
        self.again = False
        #: Whether the present batch began without Postgres. Then its parts are not noted, because that would only take
        #: time, and nothing is known of an earlier try.
        self.away = False

    def begin(self, query: Query, batch_id: int, stopped: Callable[[], bool] = lambda: False) -> Holder:
        """Take the app id for a batch. Returns what was known of the batch.

        Raises ConfigError when the batch may not be written under this app id. `stopped`: whether nobody waits for the
        batch any longer. Waits for Postgres when only Postgres can tell.
        """
        known = self._known(query, batch_id)
        self.again = known is None or known is self._holder
        self.away, self.waited_s, self._stopped = False, 0.0, stopped

        async def taking(ledger: SparkLedger) -> Holder:
            timeout_s = _TRY_S if known is None else _SHORT_S
            if known is None and (other := await ledger.renamed(self._config.app_id, query, batch_id, timeout_s)):
                raise self._renamed(*other, batch_id)
            holder = await ledger.begin(self._config.app_id, query, batch_id, timeout_s)
            check_holder(holder, self._config.app_id, query, batch_id)
            return holder

        try:
            holder = self._with_ledger(taking, batch_id, waits=known is None)
        except StoreUnavailable as e:
            if known is None:
                raise
            check_holder(known, self._config.app_id, query, batch_id)
            _log.warning("batch %d of %s goes on without Postgres: %s", batch_id, self._config.app_id, e)
            self.away, holder = True, known
        self._query, self._holder = query, holder
        return holder

    def done(self, batch_id: int, planned: int, counts: RowCounts) -> None:
        """Note that a batch is done, if Postgres answers now."""
        app_id, rows = self._config.app_id, counts.written + counts.repeated + counts.bad

        async def noting(ledger: SparkLedger) -> None:
            await ledger.done(
                app_id, self._query, batch_id, planned, rows=rows, repeated=counts.repeated, bad=counts.bad,
                waited_ms=counts.waited_ms, timeout_s=_AWAY_S if self.away else _SHORT_S,
            )  # fmt: skip

        self._holder = Holder(self._query.query_id, batch_id, planned, done=True)
        try:
            self._with_ledger(noting, batch_id, waits=False)
        except StoreUnavailable as e:
            # If the batch comes again, all of its rows are recognized.
            _log.warning("batch %d of %s is done, but this could not be noted: %s", batch_id, app_id, e)

    def stopped(self, batch_id: int, settled: bytes) -> None:
        """Note which rows are written of a batch that ends with bad rows. Waits for Postgres."""

        async def noting(ledger: SparkLedger) -> None:
            await ledger.stop(self._config.app_id, self._query, batch_id, settled)

        self._holder = Holder(self._query.query_id, batch_id, None, settled=settled)
        self._with_ledger(noting, batch_id)

    def setup(self) -> None:
        """Make sure that the tables exist, for a batch without a number."""

        async def nothing(_: SparkLedger) -> None: ...

        self._with_ledger(nothing, None)

    def _known(self, query: Query, batch_id: int) -> Holder | None:
        """Return what this process knows of the batch from earlier ones of the same run; None: nothing."""
        if self._holder is None or query != self._query or batch_id < self._holder.batch_id:
            return None
        return self._holder if batch_id == self._holder.batch_id else Holder(query.query_id, batch_id)

    def _renamed(self, other: str, at: int, batch_id: int) -> ConfigError:
        if at > batch_id:
            return _older(other, at, batch_id)
        return ConfigError(
            f"this query has written batch {at} under the app id {other!r}, and batch {batch_id} is not finished for "
            f"Spark: under the app id {self._config.app_id!r} its rows would be written again. Let the query finish "
            f"the batch under {other!r} and rename it then. (Of two sinks in one query, call the older one first.)"
        )

    def _with_ledger(
        self, work: Callable[[SparkLedger], Awaitable[T]], batch_id: int | None, *, waits: bool = True
    ) -> T:
        config = self._config
        who = f"batch {batch_id} of {config.app_id}"
        patience = Patience(config.outage_timeout_s if waits else 0.0, who, numbered=True, stopped=self._stopped)

        async def working() -> T:
            ledger = await loop().opened(("ledger", config.postgres, config.schema), open_)
            return await work(ledger)

        async def open_() -> SparkLedger:
            ledger = SparkLedger(config.postgres, config.schema)
            await ledger.open()
            try:
                await ledger.ping(_TRY_S if waits else _SHORT_S)
                await ledger.setup()
            except BaseException:
                await ledger.aclose()
                raise
            return ledger

        try:
            return loop().run(patience.until_through(working))
        finally:
            self.waited_s += patience.waited_s


def check_bad(config: SinkConfig, outcome: RowCounts) -> None:
    """Raise InvalidRecord when there are bad rows and they fail the batch."""
    if outcome.bad and config.bad_rows == "fail":
        raise InvalidRecord(
            f"{outcome.bad} rows cannot become checkpoints ({outcome.behind} rows behind them in their threads wait, "
            "all others are written); correct them at the source in the same order, or set bad_rows='quarantine': "
            f"{'; '.join(outcome.reasons)}"
        )
