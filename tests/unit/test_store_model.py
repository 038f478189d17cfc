"""The whole store against its oracle: two instances, one lane or two, every fault, and the guarantees after each step.

The steps are in `store_model.steps`, and what must hold is in `store_model.story` and `store_model.calls`. This is the
short form; ``make model`` runs as many worlds as there is time for.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from store_model.run import live
from store_model.steps import Steps
from thorough import examples, seldom

SEEDS = st.integers(0, 2**32)


@pytest.fixture(autouse=True)
def _silence() -> Iterator[None]:
    """Silence the store's logs about thousands of faults."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Store(RuleBasedStateMachine):
    """One world; hypothesis chooses its steps."""

    steps: Steps
    poisoned: bool
    broken = False

    @initialize(seed=SEEDS, poisoned=st.booleans(), lanes=st.sampled_from([1, 2]))
    def begin(self, seed: int, poisoned: bool, lanes: int) -> None:
        self.steps, self.poisoned = Steps(seed, lanes), poisoned

    @rule(name=st.sampled_from(["write", "write", "write", "burst", "retry"]), seed=SEEDS)
    def call(self, name: str, seed: int) -> None:
        self._do(name, seed)

    @rule(name=st.sampled_from(["write", "read"]), seed=SEEDS)
    def use(self, name: str, seed: int) -> None:
        self._do(name, seed)

    @rule(name=st.sampled_from(["read", "read", "read", "read_list", "flush"]), seed=SEEDS)
    def look(self, name: str, seed: int) -> None:
        self._do(name, seed)

    @rule(seed=SEEDS)
    def wait(self, seed: int) -> None:
        self._do("wait", seed)

    @rule(
        name=st.sampled_from(
            [
                "crash",
                "restart",
                "log_faults",
                "store_faults",
                "store_outage",
                "hold_row",
                "log_outage",
                "lose_feed",
                "come_late",
                "be_overtaken",
                "other_owner",
                "lose_hot_state",
                "fail_over",
                "repair",
                "pause",
            ]
        ),
        seed=SEEDS,
    )
    def fail(self, name: str, seed: int) -> None:
        self._do(name, seed)

    @precondition(lambda self: self.poisoned)
    @rule(name=st.sampled_from(["garbage", "poison", "quarantine", "quarantine"]), seed=SEEDS)
    def poison(self, name: str, seed: int) -> None:
        self._do(name, seed)

    def _do(self, name: str, seed: int) -> None:
        self.broken = True
        self.steps.step(name, random.Random(seed))
        self.broken = False

    def teardown(self) -> None:
        if not hasattr(self, "steps"):
            return
        try:
            if not self.broken:
                self.steps.finish()
        finally:
            self.steps.world.close()


TestStore = Store.TestCase
TestStore.settings = examples(
    25,  # `make model` goes on for as long as you like
    stateful_step_count=40,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],  # shrinking takes minutes: add Phase.shrink to look for a short way
)


# The world of seed 2 has two lanes.
@pytest.mark.parametrize("seed", [0, 2, *seldom(1, *range(3, 20))])
def test_a_long_life(seed: int) -> None:
    live(seed)
