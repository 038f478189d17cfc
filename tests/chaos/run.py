"""Chaos: processes under a seeded schedule of faults, and a verdict.

    python -m chaos.run --seconds 60 --seed 1        (or: make chaos SECONDS=60 SEED=1)

The seed decides which kinds of fault come when, what they hit and how long they last; how the processes react depends
on the machine. After every phase all is healed, and the time until flushing resumes is measured. At the end everything
is flushed, Postgres is read, and the checkers judge. The folder with the history stays when a rule is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from bufstore import BufstoreError, Verification
from bufstore.buffer.entry import Malformed
from bufstore.buffer.operate.audit import verification_of_all
from bufstore.buffer.operate.quarantine import Quarantine
from bufstore.tasks import together
from chaos.domain import NAMES, domain
from chaos.faults import KINDS, Kind
from chaos.history import Final, ParkedEntry, Recovery, load
from chaos.report import Report, judge
from chaos.site import Lane, Site
from helpers import eventually

_SAMPLE_S = 0.3
_POLL_S = 0.1
#: How long the supervisor waits for flushing after a heal, in seconds.
_RECOVERY_WAIT_S = 30.0
_STOP_S = 60.0


@dataclass(frozen=True)
class Phase:
    """Faults that happen at the same time, and the calm after them."""

    kinds: tuple[Kind, ...]
    #: Decides what the faults hit.
    salt: int
    hold_s: float
    calm_s: float


def schedule(seed: int, kinds: Sequence[Kind]) -> Iterator[Phase]:
    """Yield phases for ever: every kind comes once before any comes again; many phases combine two or three."""
    chance = random.Random(seed)
    deck: list[Kind] = []
    while True:
        deck = deck or chance.sample(kinds, len(kinds))
        chosen = [deck.pop()]
        for _ in range(chance.choice((0, 0, 1, 1, 2))):
            touched = {word for kind in chosen for word in kind.touches}
            fits = [k for k in deck if touched.isdisjoint(k.touches) and not k.alone and not chosen[0].alone]
            if fits:
                chosen.append(fits[-1])
                deck.remove(fits[-1])
        yield Phase(tuple(chosen), chance.getrandbits(32), chance.uniform(0.5, 3.5), chance.uniform(0.5, 2.0))


@dataclass
class Supervisor:
    """Runs one seed."""

    site: Site
    seconds: float
    kinds: Sequence[Kind]
    #: The run ends after this many phases at the latest.
    phases_max: int
    #: Processes that ended by themselves, or did not end when told to.
    crashes: list[str] = field(default_factory=list)
    #: True once the supervisor no longer injects or watches.
    over: bool = False

    async def run(self) -> Verification | BufstoreError:
        """Start, inject faults and drain; return the result of the self-check."""
        site = self.site
        await asyncio.gather(*(p.start() for p in site.processes))
        await self._wait_until_ready()
        watching = [asyncio.create_task(self._sample()), asyncio.create_task(self._watch())]
        try:
            end = time.monotonic() + self.seconds
            for phase in islice(schedule(site.seed, self.kinds), self.phases_max):
                await self._phase(phase)
                if time.monotonic() > end:
                    break
        finally:
            # A flag is needed too: asyncio.wait_for of Python 3.11, which the clients use, may swallow a cancellation.
            self.over = True
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
        return await self._drain()

    async def _wait_until_ready(self) -> None:
        async def ready() -> bool:
            for p in self.site.processes:
                if p.exit_code is not None:
                    log = (self.site.folder / f"{p.name}.log").read_text()
                    raise RuntimeError(f"{p.name} ended at once:\n{log[-2000:]}")
            return all(self.site.started(p) for p in self.site.processes)

        await eventually(ready, 60)

    async def _phase(self, phase: Phase) -> None:
        site = self.site
        async with contextlib.AsyncExitStack() as stack:
            details = {}
            for number, kind in enumerate(phase.kinds):
                site.note(kind.name, "begin")
                chance = random.Random(f"{phase.salt} {number}")
                details[kind.name] = await stack.enter_async_context(kind.inject(site, chance))
                site.note(kind.name, "inject", details[kind.name])
            await asyncio.sleep(phase.hold_s)
        healed = time.monotonic()
        for kind in phase.kinds:
            site.note(kind.name, "heal", details[kind.name])
        await self._recovery(tuple(k.name for k in phase.kinds), healed)
        await asyncio.sleep(phase.calm_s)

    async def _recovery(self, kinds: tuple[str, ...], healed: float) -> None:
        site = self.site
        before, ends = await site.persist(site.cursors, 60), await site.persist(site.ends, 60)
        behind = {p: end for p, end in ends.items() if before.get(p, (0, 0))[1] < end}
        flushing = caught_up = None
        while caught_up is None and time.monotonic() - healed < _RECOVERY_WAIT_S:
            now = await site.persist(site.cursors, 60)
            passed = time.monotonic() - healed
            at = {p: now.get(p, (0, 0))[1] for p in behind}
            if flushing is None and all(at[p] > before.get(p, (0, 0))[1] for p in behind):
                flushing = passed
            if all(at[p] >= end for p, end in behind.items()):
                caught_up = passed
            else:
                await asyncio.sleep(_POLL_S)
        site.recorder.write(Recovery(healed, kinds, flushing, caught_up))

    async def _sample(self) -> None:
        while not self.over:
            await asyncio.sleep(_SAMPLE_S)
            with contextlib.suppress(Exception):  # a server is away, so there is no sample
                await self.site.sample()

    async def _watch(self) -> None:
        while not self.over:
            await asyncio.sleep(_POLL_S)
            for p in self.site.processes:
                if p.wanted and p.exit_code is not None:
                    self.crashes.append(f"{p.name} ended by itself ({p.exit_code})")
                    await p.start()

    async def _drain(self) -> Verification | BufstoreError:
        """Stop the processes properly, flush the rest, and verify everything."""
        site = self.site
        for roles in (("writer", "reader", "all"), ("flusher",)):
            ending = [p for p in site.processes if p.role in roles]
            for p, clean in zip(ending, await asyncio.gather(*(p.end(_STOP_S) for p in ending)), strict=True):
                if not clean:
                    self.crashes.append(f"{p.name} did not end when told to ({p.exit_code})")
        try:
            async with site.store(flusher=True) as store:
                await together(buffer.force_flush_all(timeout_s=60) for buffer in store.lanes.all)
                history = load(sorted(site.folder.glob("*.jsonl")))
                await site.domain.read_back(store, history, random.Random(site.seed), site.recorder)
                return verification_of_all(await together(buffer.verify() for buffer in store.lanes.all))
        except BufstoreError as e:
            return e

    async def final(self) -> Final:
        """Return the final contents of Postgres."""
        parked: dict[int, ParkedEntry] = {}
        async with self.site.store(flusher=False) as store:
            for lane, buffer in zip(self.site.lanes, store.lanes.all, strict=True):
                parked |= await _parked(lane, buffer.quarantine)
        return await self.site.domain.final(self.site.servers.postgres.dsn, parked)


async def _parked(lane: Lane, quarantine: Quarantine) -> dict[int, ParkedEntry]:
    parked: dict[int, ParkedEntry] = {}
    after = 0
    while page := await quarantine.page(after=after):
        for line in page:
            item = (await quarantine.show(line.seq)).item
            body = b"".join(m.body for m in item.messages) if isinstance(item, Malformed) else item.entry.payload
            parked[lane.position(line.seq)] = ParkedEntry(line.thread_id, body)
            after = line.seq
    return parked


async def run(
    seed: int,
    seconds: float,
    folder: Path,
    kinds: Sequence[str] = (),
    *,
    phases: int = 10**9,
    recovery_s: float = 10.0,
    on: str = "threads",
) -> Report:
    """Run one seed and judge it. `recovery_s`: how long flushing may pause after a heal. `on`: the domain."""
    async with _small_disk(folder, seconds) as disk, Site(folder, seed, disk, domain(on)) as site:
        unknown = [name for name in kinds if name not in KINDS]
        if unknown:
            raise SystemExit(f"no such kind of fault: {', '.join(unknown)}; there are {', '.join(sorted(KINDS))}")
        wanted = [KINDS[name] for name in sorted(kinds or KINDS)]
        possible = [kind for kind in wanted if kind.possible(site)]
        supervisor = Supervisor(site, seconds, possible, phases)
        began = time.monotonic()
        verified = await supervisor.run()
        lasted = time.monotonic() - began
        final = await supervisor.final()
        skipped = [kind.name for kind in wanted if kind not in possible]
        return judge(site, final, verified, supervisor.crashes, skipped, lasted, recovery_s)


@contextlib.asynccontextmanager
async def _small_disk(folder: Path, seconds: float) -> AsyncIterator[Path | None]:
    """Mount a small file system, if that is allowed."""
    path = folder / "small"
    path.mkdir()
    size = f"size={64 + int(1.5 * seconds)}m,mode=711"
    command = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:  # noqa: ASYNC221 - at the start
        yield None
        return
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)  # noqa: ASYNC221 - nothing else is going on any more


def new_folder(seed: int) -> Path:
    """Make the folder for a run's history."""
    folder = Path(tempfile.mkdtemp(prefix=f"bufstore-chaos-{seed}-"))
    folder.chmod(0o711)  # Postgres' account must be able to enter
    return folder


def main() -> int:
    """Run the command line; returns 1 when a rule is broken."""
    parser = argparse.ArgumentParser(prog="chaos", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--on", default=NAMES[0], choices=NAMES, help="what is written: a domain")
    parser.add_argument("--kinds", default="", help="only these kinds of fault, separated by commas")
    parser.add_argument("--keep", action="store_true", help="keep the history also when nothing is wrong")
    arguments = parser.parse_args()
    folder = new_folder(arguments.seed)
    kinds = [k for k in arguments.kinds.split(",") if k]
    report = asyncio.run(run(arguments.seed, arguments.seconds, folder, kinds, on=arguments.on))
    sys.stdout.write(report.text())
    if report.ok and not arguments.keep:
        shutil.rmtree(folder)
    else:
        (folder / "report.txt").write_text(report.text())
        sys.stdout.write(f"history: {folder}\n")
        again = f"SEED={arguments.seed} SECONDS={arguments.seconds:g} DOMAIN={arguments.on}"
        sys.stdout.write(f"again:   make chaos {again}\n")
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
