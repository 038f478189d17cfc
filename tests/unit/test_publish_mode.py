"""Plain or batch: the faster one is found on any server, and the slower one is tried ever more rarely."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from bufstore.jetstream.publish_mode import BATCH_FROM, PLAIN_TO, PublishModes
from thorough import examples


def test_a_lone_message_is_never_a_batch_and_very_many_always_are() -> None:
    shapes = PublishModes()
    for _ in range(10_000):
        assert not shapes.batched(BATCH_FROM - 1)
        assert shapes.batched(PLAIN_TO)
        shapes.took(PLAIN_TO, True, 1000.0)
        shapes.took(BATCH_FROM - 1, False, 1000.0)


@examples(200)
@given(
    plain_s=st.floats(1e-6, 1e-2),
    floor_s=st.floats(1e-5, 1e-1),
    messages=st.integers(BATCH_FROM, PLAIN_TO - 1),
    noise=st.floats(0, 0.2),
    seed=st.integers(0, 2**32),
)
def test_the_faster_shape_is_found_and_the_slower_one_costs_little(
    plain_s: float, floor_s: float, messages: int, noise: float, seed: int
) -> None:
    chance = random.Random(seed)
    cost = {False: plain_s * messages, True: floor_s + 1e-5 * messages}
    shapes = PublishModes()
    used = {False: 0, True: 0}
    for number in range(2000):
        batched = shapes.batched(messages)
        if number >= 1000:
            used[batched] += 1
        shapes.took(messages, batched, cost[batched] * (1 + noise * chance.random()))
    better = cost[True] < cost[False]
    if max(cost.values()) > 1.5 * min(cost.values()):
        assert used[not better] <= 20


def test_a_server_that_changes_is_noticed() -> None:
    shapes = PublishModes()

    def share_of_batches(rounds: int, plain_s: float, batch_s: float) -> float:
        batches = 0
        for _ in range(rounds):
            batched = shapes.batched(32)
            batches += batched
            shapes.took(32, batched, batch_s if batched else plain_s)
        return batches / rounds

    assert share_of_batches(3000, plain_s=0.006, batch_s=0.0025) > 0.95
    share_of_batches(10_000, plain_s=0.0005, batch_s=0.0025)  # the disk no longer has to sync
    assert share_of_batches(3000, plain_s=0.0005, batch_s=0.0025) < 0.05


@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 10)), max_size=200))
def test_whatever_is_measured_every_shape_is_tried_again(groups: list[tuple[int, float]]) -> None:
    shapes = PublishModes()
    for messages, seconds in groups:
        shapes.took(messages, shapes.batched(messages), seconds)
    for _ in range(2):
        assert {shapes.batched(32) for _ in range(5000)} == {True, False}
