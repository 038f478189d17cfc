"""The report of a chaos run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from urllib.parse import urlsplit

from bufstore import BufstoreError, Verification
from chaos import checkers
from chaos.checkers import Violation
from chaos.history import Final, History, load
from chaos.site import BUFFER, LEASE_S, LOG, Site

#: Longest time of a call: reading, appending, waiting for Postgres, and the delay of two busy cores.
_DEADLINE_S = BUFFER["append_timeout_s"] + BUFFER["read_timeout_s"] + 8
_RSS_BYTES = 1 << 30
_SHOWN = 20
#: How long other processes are watched after the kill of a writer, in seconds.
_AFTER_KILL_S = 3.0


@dataclass
class Report:
    """The verdict and its evidence."""

    seed: int
    seconds: float
    history: History
    violations: list[Violation] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    flusher_kills: list[float] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True when no rule is broken."""
        return not self.violations

    @property
    def injected(self) -> Counter[str]:
        """How often each kind of fault was injected."""
        kinds = Counter(f.kind for f in self.history.faults if f.what == "inject")
        repeated = sum(o.ok and o.kind == "retry" for t in self.history.threads.values() for o in t.ops)
        if repeated:
            kinds["retry long after the answer"] = repeated
        return kinds

    def text(self) -> str:
        """Return the report for people, in lines."""
        h = self.history
        acked = sorted(o.ended for t in h.threads.values() for o in t.ops if o.ok)
        reads = Counter(r.level for t in h.threads.values() for r in t.reads)
        stall = max((b - a for a, b in pairwise(acked)), default=0.0)
        broken = Counter(v.rule for v in self.violations)
        injected = self.injected
        flushing = [r.flushing_s for r in h.recoveries if r.flushing_s is not None]
        caught_up = [r.caught_up_s for r in h.recoveries if r.caught_up_s is not None]
        writing = [min((a - r.t for a in acked if a >= r.t), default=float("inf")) for r in h.recoveries]
        rate = h.acknowledged / self.seconds
        lines = [
            f"seed {self.seed}, {self.seconds:.0f} s, {sum(injected.values())} faults of {len(injected)} kinds:",
            *(f"  {count:4} {kind}" for kind, count in sorted(injected.items())),
            *(f"     - {kind}: cannot be done here" for kind in self.skipped),
            f"writes acknowledged      {h.acknowledged} ({rate:.0f}/s) in {len(h.threads)} threads",
            f"reads                    {', '.join(f'{n} {level}' for level, n in sorted(reads.items()))}",
            f"calls that raised        {_counted(Counter(f.error for f in h.failures))}",
            f"lost / twice / order     {broken['lost']} / {broken['duplicated']} / {broken['reordered']}",
            f"stale / phantom / flicker {broken['stale']} / {broken['phantom']} / {broken['flicker']}",
            f"longest stall of writes  {stall:.1f} s",
            f"after a heal             writing {_longest(writing)}, flushing {_longest(flushing)}, "
            f"caught up {_longest(caught_up)} of {len(h.recoveries)} times",
            f"kill -9 of a writer      others waited {_longest(self._writer_kills())}",
            f"kill -9 of a flusher     its partitions waited {_longest(self.flusher_kills)} (lease {LEASE_S} s), "
            f"writers {_longest(self._gaps_after('kill flusher', LEASE_S))}",
            f"all rules broken         {_counted(broken)}",
            *(f"  {violation}" for violation in self.violations[:_SHOWN]),
        ]
        return "\n".join(lines) + "\n"

    def _writer_kills(self) -> list[float]:
        return self._gaps_after("kill writer", _AFTER_KILL_S)

    def _gaps_after(self, kind: str, seconds: float) -> list[float]:
        """Return, for each such kill, the longest time without an acknowledgement of the other processes."""
        kills = [f for f in self.history.faults if f.kind == kind and f.what == "inject"]
        begins = [f for f in self.history.faults if f.kind == kind and f.what == "begin"]
        gaps = []
        for begin, kill in zip(begins, kills, strict=False):
            times = sorted(
                o.ended
                for t in self.history.threads.values()
                for o in t.ops
                if o.ok and o.process != kill.detail and begin.t <= o.ended <= begin.t + seconds
            )
            gaps.append(max((b - a for a, b in pairwise(times)), default=seconds))
        return gaps


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {what}" for what, n in counts.most_common()) or "none"


def _longest(times: list[float]) -> str:
    return f"at most {max(times):.2f} s ({len(times)})" if times else "-"


def judge(
    site: Site,
    final: Final,
    verified: Verification | BufstoreError,
    crashes: list[str],
    skipped: list[str],
    seconds: float,
    recovery_s: float,
) -> Report:
    """Load the history and apply all checkers."""
    history = load(sorted(site.folder.glob("*.jsonl")))
    found = [v for check in site.domain.checkers for v in check(history, final)]
    found += checkers.slow_recovery(history, final, limit_s=recovery_s)
    found += checkers.unbounded(history, final, log_bytes=int(LOG["max_bytes"]), rss_bytes=_RSS_BYTES)  # type: ignore[call-overload]
    found += checkers.dishonest(history, final, deadline_s=_DEADLINE_S)
    found += [Violation("crash", None, crash) for crash in crashes]
    found += _secrets(site)
    if isinstance(verified, BufstoreError):
        found.append(Violation("drain", None, f"{type(verified).__name__}: {verified}"))
    else:
        found += [Violation("verify", f.thread_id, f"{f.rule}: {f.detail}") for f in verified.findings]
        if verified.unflushed_entries:
            found.append(Violation("drain", None, f"{verified.unflushed_entries} entries are not flushed"))
    return Report(site.seed, seconds, history, found, skipped, site.flusher_kills)


def _secrets(site: Site) -> list[Violation]:
    """I12: no log line and no error contains a password."""
    secrets = [urlsplit(url).password for url in (site.servers.nats.url, site.servers.postgres.dsn)]
    return [
        Violation("secret", None, f"a password stands in {path.name}")
        for path in sorted([*site.folder.glob("*.log"), *site.folder.glob("*.jsonl")])
        if any(s and s in path.read_text(errors="replace") for s in secrets)
    ]
