"""The power cut: the servers' disks are images, copied while everything runs, as a power cut would leave them.

    python -m sweep.powercut [--rounds N] [--seed N]

Both servers keep their data on a file system of their own, in a loop-mounted image. While writers append, the servers
are paused for a moment and the image is copied, which leaves out whatever was never synced. The copy is mounted, the
servers are started on it, and the checkpoints that were acknowledged before the copy are looked for.

With `sync_interval: always` none may be missing. With nats-server's default (a sync every two minutes) acknowledged
checkpoints must be missing, or the test could not notice a loss; and `doctor` must have warned of it.
Needs root and loop mounts; otherwise it says so and exits with code 2.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bufstore import BufferConfig, BufferedThreadStore, BufstoreError, Consistency, LogConfig, PostgresThreadStore, Run
from bufstore.cli.doctor.diagnosis import Level
from bufstore.cli.doctor.disk_sync import check_sync
from bufstore.embedded import Servers
from helpers import eventually

_IMAGE_MB = 768
#: The long commit interval keeps the kernel from writing data back by itself during a round.
_OPTIONS = "loop,commit=300"
_THREADS = 8
#: More than so many messages are acknowledged before the power is cut.
LEAST = 50


def why_not() -> str:
    """Why this machine cannot run the power cut; empty if it can."""
    if os.geteuid() != 0:
        return "it mounts images: run it as root"
    missing = [p for p in ("mkfs.ext4", "mount", "umount") if shutil.which(p) is None]
    if missing:
        return f"there is no {', '.join(missing)}"
    with tempfile.TemporaryDirectory() as folder:
        try:
            image = _new_image(Path(folder) / "probe", 16)
            with _mounted(image, Path(folder) / "mounted"):
                return ""
        except subprocess.CalledProcessError as e:
            return f"loop mounts do not work here: {(e.stderr or b'').decode().strip()}"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _new_image(path: Path, megabytes: int) -> Path:
    with path.open("wb") as file:
        file.truncate(megabytes << 20)
    _run("mkfs.ext4", "-q", "-F", str(path))
    return path


@contextmanager
def _mounted(image: Path, place: Path) -> Iterator[Path]:
    """Mount the image's file system; at the end unmount it and release its loop device, whatever happens."""
    place.mkdir()
    _run("mount", "-o", _OPTIONS, str(image), str(place))
    try:
        place.chmod(0o711)
        yield place
    finally:
        try:
            _run("umount", str(place))
        except subprocess.CalledProcessError:
            _run("umount", "--lazy", str(place))  # a process still has a file open there


class Round:
    """One power cut: what was acknowledged before it, and what is there after it."""

    def __init__(self, folder: Path, sync_interval: str, seed: str, flush_interval_s: float) -> None:
        self._folder = folder
        self._sync_interval = sync_interval
        self._chance = random.Random(seed)
        self._config = BufferConfig(log=LogConfig(max_bytes=128 << 20), flush_interval_s=flush_interval_s, lease_s=4)
        #: The acknowledged numbers of each thread.
        self._told: dict[str, list[int]] = {f"t{n}": [] for n in range(_THREADS)}
        self.warned = False
        self.acknowledged = 0
        self.lost = 0
        self.noticed = ""

    async def run(self) -> None:
        """Write, cut the power, and look at what is left."""
        image, copy = _new_image(self._folder / "disk", _IMAGE_MB), self._folder / "copy"
        with _mounted(image, self._folder / "before") as place:
            servers = Servers(place / "data", sync_interval=self._sync_interval)
            await asyncio.to_thread(servers.start)
            try:
                await self._write_and_cut(servers, image, copy)
            finally:
                await asyncio.to_thread(servers.stop)
        with _mounted(copy, self._folder / "after") as place:
            servers = Servers(place / "data", sync_interval=self._sync_interval)
            await asyncio.to_thread(servers.start)
            try:
                await self._look(servers)
            finally:
                await asyncio.to_thread(servers.stop)

    async def _write_and_cut(self, servers: Servers, image: Path, copy: Path) -> None:
        checks = await check_sync(None, None, None, servers.nats.sync_interval)
        self.warned = any(c.level is Level.WARNING for c in checks)
        store = await self._open(servers)
        # The setup must survive: only what is written from here on is tested.
        await asyncio.to_thread(os.sync)
        stop = asyncio.Event()
        writers = [asyncio.create_task(self._write(store, t, stop)) for t in self._told]
        await asyncio.sleep(1 + self._chance.random())
        await eventually(self._enough)
        told = {t: list(numbers) for t, numbers in self._told.items()}
        servers.nats.pause()
        servers.postgres.pause()
        try:
            await asyncio.to_thread(shutil.copyfile, image, copy)
        finally:
            servers.nats.resume()
            servers.postgres.resume()
        stop.set()
        await asyncio.gather(*writers)
        await store.aclose()
        self._told = told
        self.acknowledged = sum(map(len, told.values()))

    async def _enough(self) -> bool:
        return sum(map(len, self._told.values())) > LEAST

    async def _open(self, servers: Servers) -> BufferedThreadStore:
        inner = PostgresThreadStore(servers.postgres.dsn, pool_size=4)
        return await BufferedThreadStore.open(inner, nats=servers.nats.url, config=self._config)

    async def _write(self, store: BufferedThreadStore, thread_id: str, stop: asyncio.Event) -> None:
        run = Run(run_id=f"run-of-{thread_id}", thread_id=thread_id)
        for number in range(10**9):
            while not stop.is_set():
                try:
                    await store.checkpoint_append(thread_id, [number], run, idempotency_key=f"{number}")
                except BufstoreError:
                    continue
                self._told[thread_id].append(number)
                break
            if stop.is_set():
                return

    async def _look(self, servers: Servers) -> None:
        try:
            async with await self._open(servers) as store:
                await store.force_flush_all(timeout_s=20)
                for thread_id, told in self._told.items():
                    found = await store.load_messages(thread_id, consistency=Consistency.EVENTUAL) or []
                    self.lost += len(set(told) - set(found))
                    assert found == list(range(len(found))), f"{thread_id} holds {found}, which is not what was written"
        except BufstoreError as e:
            # When the log is refused, only the content of Postgres can be counted.
            self.noticed = type(e).__name__
            async with PostgresThreadStore(servers.postgres.dsn) as inner:
                for thread_id, told in self._told.items():
                    self.lost += len(set(told) - set(await inner.load_messages(thread_id) or []))


def cut(sync_interval: str, seed: str, *, flush_interval_s: float = 0.2) -> Round:
    """Run one round, in a temporary folder.

    With a `flush_interval_s` longer than a round, nothing that the log loses is in Postgres, which syncs.
    """
    with tempfile.TemporaryDirectory(prefix="powercut-") as folder:
        Path(folder).chmod(0o711)
        done = Round(Path(folder), sync_interval, seed, flush_interval_s)
        asyncio.run(done.run())
    return done


def verdict(sync_interval: str, rounds: Sequence[Round]) -> str:
    """What is wrong with these rounds; empty if nothing is."""
    if sync_interval == "always":
        lost = sum(r.lost for r in rounds)
        return f"{lost} acknowledged checkpoints are lost" if lost else ""
    if not any(r.lost for r in rounds):
        return "nothing is lost without syncs: the test does not bite"
    return "" if all(r.warned for r in rounds) else "doctor has not warned"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="powercut")
    parser.add_argument("--rounds", type=int, default=3, help="cuts per setting (default 3)")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    reason = why_not()
    if reason:
        print(f"powercut cannot be done: {reason}")
        return 2
    print(f"{'sync_interval':<15}{'round':>6}{'acknowledged':>14}{'lost':>7}{'doctor warned':>15}  noticed as")
    wrong = []
    for sync_interval in ("always", "2m"):
        rounds = []
        for number in range(given.rounds):
            r = cut(sync_interval, f"{given.seed} {sync_interval} {number}", flush_interval_s=(5.0, 0.2)[number % 2])
            rounds.append(r)
            warned = "yes" if r.warned else "no"
            line = f"{sync_interval:<15}{number + 1:>6}{r.acknowledged:>14}{r.lost:>7}{warned:>15}  {r.noticed or '-'}"
            print(line, flush=True)
        found = verdict(sync_interval, rounds)
        wrong += [f"{sync_interval}: {found}"] if found else []
    print("FAILED: " + "; ".join(wrong) if wrong else "nothing acknowledged is lost with syncs, and it is without")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
