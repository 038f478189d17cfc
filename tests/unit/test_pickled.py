"""What an app sends to another process before it is opened."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from bufstore import BufferConfig, LogConfig, MemoryThreadStore, NatsConfig, PostgresThreadStore
from bufstore.langgraph import PostgresCheckpointStore
from bufstore.newest import Newest


@pytest.mark.parametrize(
    "made", [PostgresThreadStore("dbname=x"), PostgresCheckpointStore("dbname=x"), MemoryThreadStore()]
)
def test_a_store_that_is_not_open_can_be_sent_to_another_process(made: Any) -> None:
    again = pickle.loads(pickle.dumps(made))
    assert type(again) is type(made)
    assert vars(again).keys() == vars(made).keys()


def test_configurations_are_the_same_in_another_process() -> None:
    for config in (BufferConfig(log=LogConfig(lanes=2)), NatsConfig(user="u", password="p")):
        assert pickle.loads(pickle.dumps(config)) == config


def test_what_a_process_remembers_stays_there() -> None:
    memory: Newest[str, int] = Newest(2)
    memory["a"] = 1
    again = pickle.loads(pickle.dumps(memory))
    assert dict(again) == {}
    for number in range(3):
        again[f"{number}"] = number
    assert dict(again) == {"1": 1, "2": 2}
