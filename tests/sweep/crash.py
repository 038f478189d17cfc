"""The crash sweep: a process is killed at each failpoint under load, started again, and everything is checked.

    python -m sweep.crash [--rounds N] [--seed N] [--only POINT ...]

Each round has a log and tables of its own. The first life dies at the point; the second may die there once more; the
third ends by itself. A point that no life reached fails the sweep.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bufstore.embedded import Servers
from bufstore.failpoints import Failpoint
from chaos.history import load
from conftest import Deployment
from sweep.checks import violations

#: After this time a life counts as stuck; it usually takes some seconds.
_LIFE_S = 90.0
_VISITS_MAX = 5
_PURGES = {Failpoint.PURGE_BEFORE, Failpoint.PURGE_DONE, Failpoint.IDLE_MOVED}


@dataclass
class Result:
    """The result of one failpoint."""

    point: Failpoint
    #: How many processes died at the point, and in how many rounds.
    kills: int = 0
    rounds: int = 0
    acknowledged: int = 0
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether the point was reached in each round, and nothing was wrong."""
        return self.kills >= self.rounds > 0 and not self.violations


async def sweep_point(servers: Servers, point: Failpoint, rounds: int, chance: random.Random) -> Result:
    """Kill processes at the point, in `rounds` deployments."""
    result = Result(point)
    began = time.monotonic()
    for number in range(rounds):
        # The first visit of a point happens in a fresh system, later ones in a busy system.
        visit = 1 if number == 0 else chance.randint(2, _VISITS_MAX)
        if not await _round(servers, result, visit, chance.randint(1, _VISITS_MAX)) and visit > 1:
            await _round(servers, result, 1, 1)
        result.rounds += 1
    result.seconds = time.monotonic() - began
    return result


async def _round(servers: Servers, result: Result, visit: int, again: int) -> bool:
    """Run one deployment. Returns whether a process died at the point."""
    # A short failover window lets purging begin soon.
    windows = {"failover_window_s": 2.0} if result.point in _PURGES else {}
    deployment = Deployment(servers, max_bytes=64 << 20, **windows)
    deployment.verified = False  # `violations` verifies the deployment instead
    with tempfile.TemporaryDirectory() as folder:
        history = Path(folder) / "history"
        kills = 0
        for life, (point, at) in enumerate(((result.point, visit), (result.point, again), (None, 1))):
            code, said = await _live(deployment, history, life, point, at)
            if code not in (0, -signal.SIGKILL) or (code and point is None):
                result.violations.append(f"a process ended with {code}: {said}")
                return True
            kills += code != 0
            if not code:
                break
        past = load([history])
    result.kills += kills
    result.acknowledged += past.acknowledged
    try:
        async with deployment.store() as store:
            result.violations += await violations(store, past)
    except Exception as e:
        result.violations.append(f"checking failed: {type(e).__name__}: {e}")
    return kills > 0


async def _live(
    deployment: Deployment, history: Path, life: int, point: Failpoint | None, visit: int
) -> tuple[int, str]:
    """Run one life of the process. Returns its exit code and its last output."""
    log = deployment.log
    options = {
        "nats": deployment.servers.nats.url,
        "postgres": deployment.servers.postgres.dsn,
        "schema": deployment.name,
        "history": str(history),
        "life": life,
        "log": dataclasses.asdict(log),
        "point": point,
        "visit": visit,
        "purging": point in _PURGES,
    }
    path = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "sweep.worker",
        json.dumps(options),
        env=os.environ | {"PYTHONPATH": path},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_LIFE_S):
            _, said = await process.communicate()
    except TimeoutError:
        process.kill()
        _, said = await process.communicate()
        return 124, f"it did not end in {_LIFE_S:g} s; {_end(said)}"
    assert process.returncode is not None
    return process.returncode, _end(said)


def _end(said: bytes) -> str:
    return said.decode(errors="replace").strip()[-2000:]


async def sweep(points: Sequence[Failpoint], rounds: int, seed: int, at_once: int = 2) -> list[Result]:
    """Sweep all points; print a line for each when it is done."""
    results: list[Result] = []
    places = asyncio.Semaphore(at_once)
    with Servers() as servers:

        async def one(point: Failpoint) -> None:
            async with places:
                result = await sweep_point(servers, point, rounds, random.Random(f"{seed} {point}"))
            results.append(result)
            wrong = "; ".join(result.violations) or ("none" if result.kills else "NEVER REACHED")
            print(f"{point:<22}{result.kills:>8}{result.acknowledged:>14}{result.seconds:>9.1f}  {wrong}", flush=True)

        print(f"{'point':<22}{'killed':>8}{'acknowledged':>14}{'seconds':>9}  violations", flush=True)
        await asyncio.gather(*map(one, points))
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="crash-sweep", description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=2, help="deployments per point (default 2)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", type=Failpoint, default=list(Failpoint), metavar="POINT")
    given = parser.parse_args(arguments)
    results = asyncio.run(sweep(given.only, given.rounds, given.seed))
    bad = [r.point for r in results if not r.ok]
    kills, told = sum(r.kills for r in results), sum(r.acknowledged for r in results)
    print(f"{len(results)} points, {kills} kills, {told} acknowledged, seed {given.seed}: ", end="")
    print(f"FAILED at {', '.join(bad)}" if bad else "nothing lost, doubled, reordered or half done")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
