"""The model test for as long as wanted: ``python tests/store_model/run.py SECONDS SEED``.

Each world is made from one seed, which also decides how many lanes it has, and ends after some steps. A failure prints
the seed that reproduces it.
"""

from __future__ import annotations

import logging
import random
import re
import sys
import time
import traceback
from collections import Counter

from store_model.steps import Steps

#: The relative frequency of each step.
WEIGHTS = {
    "write": 30, "burst": 2, "retry": 5, "read": 25, "read_list": 6, "flush": 4, "wait": 10, "crash": 4, "restart": 2,
    "log_faults": 6, "come_late": 1, "be_overtaken": 1, "store_faults": 5, "store_outage": 2, "log_outage": 2,
    "hold_row": 3, "lose_feed": 3, "pause": 3, "other_owner": 3, "lose_hot_state": 1, "fail_over": 2, "repair": 1,
    "garbage": 1, "poison": 3, "quarantine": 6,
}  # fmt: skip
#: Steps that only half of the worlds have: in a world without poison, nothing may ever be parked.
POISON = ("garbage", "poison", "quarantine")
_STEPS = 120
_TEXT_MAX = 4000


def lanes_of(seed: int) -> int:
    """How many lanes the world of this seed has."""
    return 2 if seed % 3 == 2 else 1


def live(seed: int, steps: int = _STEPS) -> Steps:
    """Run one world from its beginning to its end."""
    chance = random.Random(seed)
    names = [n for n in WEIGHTS if seed % 2 or n not in POISON]
    world = Steps(seed, lanes_of(seed))
    try:
        for _ in range(steps):
            world.step(chance.choices(names, [WEIGHTS[n] for n in names])[0], chance)
        world.finish()
    finally:
        world.world.close()
    return world


def main(seconds: float, seed: int) -> int:
    """Run one world after the other. Returns the exit code."""
    logging.disable(logging.CRITICAL)
    began, worlds, virtual = time.monotonic(), 0, 0.0
    counts: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    while True:
        try:
            world = live(seed + worlds)
        except BaseException as e:
            traceback.print_tb(e.__traceback__)
            print(re.sub("xxx+", "xx…", f"{type(e).__name__}: {e}")[:_TEXT_MAX])
            print(f"\nFAILED: make model SECONDS=0 SEED={seed + worlds} does it again")
            return 1
        worlds += 1
        counts += world.world.counts
        faults += world.world.weather.seen
        virtual += world.world.loop.time()
        if time.monotonic() - began >= seconds:
            break
    took = time.monotonic() - began
    steps = sum(n for name, n in counts.items() if name.startswith("step "))
    calls = {n: c for n, c in counts.items() if not n.startswith("step ")}
    done = sum(c for n, c in calls.items() if n.endswith(" done"))
    print(
        f"{worlds} worlds (seeds {seed} to {seed + worlds - 1}), {steps} steps, {steps / took:.0f} a second; ", end=""
    )
    print(f"{virtual / 3600:.1f} hours of their time; {sum(calls.values())} operations, {done} writes acknowledged")
    for title, table in (("operations", calls), ("faults", faults)):
        print(f"{title}: " + ", ".join(f"{name} {count}" for name, count in sorted(table.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2])))
