"""What `bufstore doctor --mailbox NAME` looks at: the bucket of a mailbox, and whether anybody works on it."""

from __future__ import annotations

from bufstore.cli.connect import Endpoints
from bufstore.cli.doctor.diagnosis import CheckResult, Level, Notes
from bufstore.cli.output import lasting
from bufstore.errors import BufstoreError
from bufstore.jetstream.server_version import ServerTooOld
from bufstore.mailbox.nats import find_mailbox

_FULL = 0.8
#: When a lease is over for longer than this many passes of a sweeper take, no sweeper runs.
_PASSES = 3
_OLD_S = 60.0


async def check_mailbox(target: Endpoints, name: str) -> list[CheckResult]:
    """Return the checks of the mailbox of this name."""
    notes = Notes(f"mailbox {name}")
    try:
        async with await find_mailbox(target.nats, name) as store:
            g, interval_s = await store.gauges(), store.config.sweep_interval_s
    except ServerTooOld as e:
        notes.say("bucket", Level.BAD, str(e))
        return notes.checks
    except BufstoreError as e:
        notes.say("bucket", Level.BAD, str(e), "open an instance, or permit STREAM.INFO and CONSUMER.INFO")
        return notes.checks
    notes.room("room", g.bytes or 0, g.bytes_max or -1, _FULL, "purge finished dispatches, or raise max_bytes")
    swept = (g.oldest_lease_over_s or 0) < _PASSES * interval_s
    expired_s = g.oldest_lease_over_s
    over = "no lease has expired" if expired_s is None else f"longest-expired lease: {lasting(expired_s)}"
    notes.require("sweeper", swept, over, "run a Sweeper in every process that works on the mailbox")
    oldest = "none" if g.oldest_queued_s is None else lasting(g.oldest_queued_s)
    waits = f"oldest in a queue: {oldest}; {g.signals_waiting} signals waiting"
    worked = not g.signals_waiting or (g.oldest_queued_s or 0) < _OLD_S
    notes.require("workers", worked, waits, "run more workers; see Worker.trouble")
    return notes.checks
