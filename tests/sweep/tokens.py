"""Chaos of exclusive work: `python -m sweep.tokens --items N [--seed N] [--replicas 1]` (or: make tokens).

Processes submit items and work on them, while processes and nodes are killed, paused and cut off, clocks jump, and the
stream is full most of the time; workers also cancel calls for work, and take locks. Then all is healed, and the
histories are judged: every accepted item was completed once, in order, no holder passed the fence, nothing was stuck,
no key waited longer than is promised, and no lock had two holders at a time or a token that is not above all earlier
ones.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from bufstore import BufstoreError
from bufstore.tokens import ExclusiveWork, TokensConfig
from cluster import Cluster
from helpers import eventually

_TTL_S = 2.0
_WORKERS, _REQUESTERS = 3, 2
_ITEMS_PER_KEY = 50
#: Room for a few dozen items; requesters are faster than workers.
_MAX_BYTES = 16_000
#: docs/TOKENS.md promises 2.2 `ttl_s`; the rest is for elections, on a machine that others use too.
_WAIT_S = 2.2 * _TTL_S + 8
_PROGRAM = Path(__file__).parent.parent / "token_process.py"


@dataclass
class Verdict:
    """The result of a run."""

    accepted: int = 0
    completed: int = 0
    begun: int = 0
    found: int = 0
    locked: int = 0
    longest_wait_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    #: Everything that must not have happened.
    wrong: list[str] = field(default_factory=list)


class Site:
    """The processes of one run."""

    def __init__(self, cluster: Cluster, folder: Path, seed: int, items: int, name: str, replicas: int) -> None:
        self._folder = folder
        self._seed = seed
        keys = [f"key {i}" for i in range(max(_REQUESTERS, items // _ITEMS_PER_KEY))]
        self._keys = [keys[i::_REQUESTERS] for i in range(_REQUESTERS)]
        self._items = -(-items // len(keys))
        self.config = TokensConfig(
            name=name,
            replicas=replicas,
            ttl_s=_TTL_S,
            timeout_s=3,
            max_bytes=_MAX_BYTES,
            waiting_max=_ITEMS_PER_KEY,
        )
        self._nats = cluster.nats()
        self.cluster = cluster
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._starts = 0

    async def start(self, process: str) -> None:
        """Start or restart a process; return when it listens to signals."""
        before = self._listened(process)
        self._start(process)
        await eventually(lambda: asyncio.to_thread(lambda: self._listened(process) > before), 60)

    def _listened(self, process: str) -> int:
        return sum(what == "listening" for _, what, *_ in self.history(process))

    def _start(self, process: str) -> None:
        role, number = process.split()
        self._starts += 1
        options = {
            "role": role, "history": str(self._folder / f"{process}.jsonl"), "seed": self._seed * 1000 + self._starts,
            "servers": list(self._nats.servers), "user": "all", "password": "all",
            "config": {n: getattr(self.config, n) for n in
                       ("name", "replicas", "ttl_s", "timeout_s", "max_bytes", "waiting_max")},
            "keys": self._keys[int(number)] if role == "requester" else [], "items": self._items,
            "begun": {key: item for _, what, key, item, _ in self.history(process) if what == "submitting"},
        }  # fmt: skip
        errors = (self._folder / f"{process}.log").open("ab")
        command = [sys.executable, str(_PROGRAM), json.dumps(options)]
        self._processes[process] = subprocess.Popen(command, stderr=errors, env=dict(os.environ))
        errors.close()

    def history(self, process: str) -> list[list[Any]]:
        """The events that the process recorded."""
        path = self._folder / f"{process}.jsonl"
        return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []

    def names(self, role: str = "") -> list[str]:
        """The names of all processes, or of those with one role."""
        return [
            f"{r} {i}" for r, n in (("worker", _WORKERS), ("requester", _REQUESTERS)) for i in range(n) if role in r
        ]

    def alive(self, process: str) -> bool:
        """Whether the process is running."""
        return self._processes[process].poll() is None

    def send(self, process: str, number: int) -> None:
        """Send a signal to the process if it is running."""
        if self.alive(process):
            self._processes[process].send_signal(number)

    async def kill(self, process: str) -> None:
        """Kill the process (SIGKILL), and wait for its end."""
        self._processes[process].kill()
        await asyncio.to_thread(self._processes[process].wait)

    async def stop(self, process: str) -> int:
        """Stop the process (SIGTERM). Returns its exit status."""
        self.send(process, signal.SIGTERM)
        return await asyncio.to_thread(self._processes[process].wait, 60)

    def end(self) -> None:
        """Kill the processes that are left."""
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()


class Faults:
    """The faults of a run; after each, everything is whole again."""

    def __init__(self, site: Site, chance: random.Random) -> None:
        self._site = site
        self._chance = chance
        self.kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "worker killed": lambda: self._killed("worker"),
            "requester killed": lambda: self._killed("requester"),
            "worker paused": lambda: self._paused("worker"),
            "requester paused": lambda: self._paused("requester"),
            "clock stepped": self._stepped,
            "node killed": self._node_killed,
            "node paused": self._node_paused,
            "node cut off": lambda: self._cut_off(silently=False),
            "node cut off silently": lambda: self._cut_off(silently=True),
        }

    async def _killed(self, role: str) -> None:
        process = self._chance.choice(self._site.names(role))
        if self._site.alive(process):
            await self._site.kill(process)
            await self._site.start(process)

    async def _paused(self, role: str) -> None:
        process = self._chance.choice(self._site.names(role))
        self._site.send(process, signal.SIGSTOP)
        await asyncio.sleep(_TTL_S * self._chance.uniform(0.5, 1.5))
        self._site.send(process, signal.SIGCONT)

    async def _stepped(self) -> None:
        for process in self._site.names("worker"):
            self._site.send(process, signal.SIGUSR1)

    async def _node_killed(self) -> None:
        server = self._chance.choice(self._site.cluster.servers)
        await asyncio.to_thread(server.kill)
        await asyncio.sleep(self._chance.uniform(0.2, 2))
        await asyncio.to_thread(server.start)
        await self._whole()

    async def _node_paused(self) -> None:
        server = self._chance.choice(self._site.cluster.servers)
        await asyncio.to_thread(server.pause)
        await asyncio.sleep(self._chance.uniform(0.2, 3))
        await asyncio.to_thread(server.resume)
        await self._whole()

    async def _cut_off(self, *, silently: bool) -> None:
        self._site.cluster.isolate(self._chance.randrange(3), silently=silently)
        await asyncio.sleep(self._chance.uniform(0.5, 4))
        self._site.cluster.heal()
        await self._whole()

    async def _whole(self) -> None:
        await eventually(lambda: asyncio.to_thread(self._site.cluster.connected), 60)


async def run(
    cluster: Cluster,
    folder: Path,
    seed: int,
    items: int,
    name: str,
    kinds: tuple[str, ...] = (),
    faults_max: int = 0,
    replicas: int = 3,
) -> Verdict:
    """Cause faults until all items are submitted, or exactly `faults_max`; then wait in calm until all is done."""
    site, chance, verdict = Site(cluster, folder, seed, items, name, replicas), random.Random(seed), Verdict()
    faults = Faults(site, chance)
    deck: list[str] = []
    try:
        async with await eventually(lambda: _open(site), 60) as work:
            await asyncio.gather(*map(site.start, site.names()))
            while any(site.alive(p) for p in site.names("requester")) or verdict.faults.total() < faults_max:
                if faults_max and verdict.faults.total() >= faults_max:
                    await asyncio.sleep(0.1)
                    continue
                deck = deck or chance.sample(kinds or list(faults.kinds), len(kinds or faults.kinds))
                kind = deck.pop()
                verdict.faults[kind] += 1
                await faults.kinds[kind]()
                await asyncio.sleep(chance.uniform(0.1, 1.0))
            healed = time.monotonic()
            try:
                await eventually(lambda: _drained(work), 120 + items / 20)
            except TimeoutError:
                verdict.wrong.append(f"stuck: {await work.statistics()}")
            for process in site.names("worker"):
                if await site.stop(process):
                    verdict.wrong.append(f"{process} ended with an error: see its log")
        judge({process: site.history(process) for process in site.names()}, healed, verdict)
    finally:
        site.end()
    return verdict


async def _open(site: Site) -> ExclusiveWork | None:
    with contextlib.suppress(BufstoreError):
        return await ExclusiveWork.open(site.cluster.nats(), site.config)
    return None


async def _drained(work: ExclusiveWork) -> bool:
    with contextlib.suppress(BufstoreError):
        return (await work.statistics()).stored == 0
    return False


def judge(histories: dict[str, list[list[Any]]], healed: float, verdict: Verdict) -> None:
    """Write into `verdict` what the histories show."""
    events = sorted(event for history in histories.values() for event in history)
    submitting, accepted = set[tuple[str, int]](), set[tuple[str, int]]()
    began, completed = defaultdict[str, list[tuple[int, int]]](list), defaultdict[tuple[str, int], list[int]](list)
    locked = defaultdict[str, list[tuple[float, int]]](list)
    for at, what, key, item, token in events:
        match what:
            case "submitting":
                submitting.add((key, item))
            case "accepted":
                accepted.add((key, item))
            case "began":
                began[key].append((token, item))
            case "completed":
                completed[key, item].append(token)
            case "found":
                verdict.found += item
            case "locked":
                locked[key].append((at, token))
    begun = {(key, item) for key, all_ in began.items() for _, item in all_}
    verdict.accepted, verdict.completed = len(accepted), len(completed)
    verdict.begun = sum(map(len, began.values()))
    say = verdict.wrong.append
    for key, item in sorted(accepted - begun):
        say(f"{key}, item {item}: accepted, and nobody began it")
    for key, item in sorted(begun - submitting):
        say(f"{key}, item {item}: begun, and nobody submitted it")
    for (key, item), tokens in completed.items():
        if len(tokens) > 1:
            say(f"{key}, item {item}: completed {len(tokens)} times")
        if any(token > tokens[0] for token, other in began[key] if other == item):
            say(f"{key}, item {item}: begun again after it was completed")
    for key, all_ in began.items():
        if len({token for token, _ in all_}) < len(all_):
            say(f"{key}: two holders with one token")
        # One that got no answer may have arrived late, behind others that its requester submitted after it.
        known = sorted((token, item) for token, item in all_ if (key, item) in accepted)
        if [item for _, item in known] != sorted(item for _, item in known):
            say(f"{key}: an earlier item has a later token")
    for key, moments in locked.items():
        verdict.locked += len({token for _, token in moments})
        # In the order of time, tokens only grow: a holder that was followed by another never holds the lock again.
        if [token for _, token in sorted(moments)] != sorted(token for _, token in moments):
            say(f"{key}: held by two at a time, or with a token that went down")
    # In the calm, workers are idle or begin items. The last gap ends with the last item.
    times = [healed, *(t for t, what, *_ in events if what == "began" and t > healed)]
    verdict.longest_wait_s = max((b - a for a, b in pairwise(times)), default=0.0)
    if verdict.longest_wait_s > _WAIT_S:
        say(f"a key waited for {verdict.longest_wait_s:.1f} s, and workers were idle")


async def main(seed: int, items: int, replicas: int) -> bool:
    """Run and report. Returns whether nothing was wrong."""
    folder = Path(tempfile.mkdtemp(prefix="bufstore-tokens-"))
    began = time.monotonic()
    async with Cluster(folder / "cluster") as cluster:
        verdict = await run(cluster, folder, seed, items, f"chaos{seed}", replicas=replicas)
    print(f"seed {seed}, replicas {replicas}: {verdict.accepted} accepted, "
          f"{verdict.completed} completed and known, {verdict.begun} begun, "
          f"{verdict.locked} locks held, "
          f"{verdict.found} found by looking, longest wait in the calm {verdict.longest_wait_s:.1f} s, "
          f"{time.monotonic() - began:.0f} s; {dict(verdict.faults)}")  # fmt: skip
    for line in verdict.wrong[:50]:
        print("WRONG:", line)
    if verdict.wrong:
        print("histories:", folder)
    else:
        shutil.rmtree(folder)
    return not verdict.wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replicas", type=int, choices=(1, 3), default=3)
    given = parser.parse_args()
    sys.exit(not asyncio.run(main(given.seed, given.items, given.replicas)))
