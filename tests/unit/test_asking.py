"""Asking NATS again for subscriptions that it refused: rarely, since it logs each question, and one at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import nats.errors
import pytest

from bufstore.config import NatsConfig
from bufstore.jetstream.asking import Asking
from bufstore.jetstream.client import ListeningClient
from bufstore.jetstream.connection import Connection


class Refused(ListeningClient):
    """A client whose subscriptions are refused, except those in `permitted`."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.permitted: set[str] = set()

    def want(self, *subjects: str) -> None:
        for subject in subjects:
            self._subs[len(self._subs)] = SimpleNamespace(subject=subject)  # type: ignore[assignment]
            self._refuse(subject)

    def _refuse(self, subject: str) -> None:
        if subject not in self.permitted:
            text = f'nats: permissions violation for subscription to "{subject.lower()}"'
            self.note(nats.errors.Error(text))

    async def subscribe(self, subject: str, *_: Any, **__: Any) -> Any:
        self.asked.append(subject)
        self._refuse(subject)

        async def unsubscribe() -> None: ...

        return SimpleNamespace(unsubscribe=unsubscribe)


async def test_many_refused_subscriptions_are_asked_for_in_turns_and_ever_more_rarely() -> None:
    client, asking = Refused(), Asking()
    client.want(*(f"S{n}" for n in range(3)))
    times = []
    for now in range(3600):
        before = len(client.asked)
        assert not await asking.permitted(client, now)
        times += [now] * (len(client.asked) - before)
    assert client.asked[:7] == ["S0", "S1", "S2", "S0", "S1", "S2", "S0"]
    assert times[:6] == [0, 10, 25, 50, 95, 160]
    assert len(times) < 65
    client.want("new")
    now = 3600
    while "new" not in client.asked:
        assert not await asking.permitted(client, now)
        now += 1
        assert now < 3650


@pytest.mark.parametrize("since", [0, 3600])
async def test_what_is_permitted_again_is_found(since: int) -> None:
    client, asking = Refused(), Asking()
    client.want("a", "b")
    for now in range(since):
        assert not await asking.permitted(client, now)
    client.permitted |= {"a", "b"}
    now = since
    while not await asking.permitted(client, now):
        now += 1
        assert now <= since + 70


async def test_what_was_refused_is_asked_for_however_much_else_is_refused() -> None:
    """Regression: of a connection's refusals only the last hundred were remembered."""
    connection, client, asking = Connection(NatsConfig(), "test"), Refused(), Asking()
    told = connection._options(client, connection._choice.given[0])["error_cb"]
    client._subs[0] = SimpleNamespace(subject="S")  # type: ignore[assignment]
    await told(nats.errors.Error('nats: permissions violation for subscription to "s"'))
    for number in range(200):
        await told(nats.errors.Error(f'nats: permissions violation for publish to "p{number}"'))
    assert not await asking.permitted(client, 0)
    assert client.asked == ["S"]
    client._remove_sub(0)
    assert not client.refused


async def test_a_new_connection_is_not_taken_for_an_answer() -> None:
    first, second, asking = Refused(), Refused(), Asking()
    first.want("a")
    second.want("a")
    assert [await asking.permitted(client, now) for now, client in enumerate([first, *[second] * 30])] == [False] * 31
    assert second.asked
