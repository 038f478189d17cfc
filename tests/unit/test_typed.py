"""What a user's type checker says of our names."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from bufstore.langgraph.saver import AsyncBufferedSaver, SaverOptions

ROOT = Path(__file__).parent.parent.parent

BLOCKING = """
from typing import assert_type

from bufstore import (
    BlockingBufferedStore, BlockingThreadStore, BufferedThreadStore, Consistency, MessagePage, MemoryThreadStore,
    ProducerSequence, Receipt, Run,
)
from bufstore.memory import MemoryNats

def use(last: Receipt, run: Run, number: ProducerSequence) -> None:
    with BlockingBufferedStore(lambda: BufferedThreadStore.open(MemoryThreadStore(), nats=MemoryNats())) as store:
        assert_type(store.checkpoint("t", [], run, idempotency_key=None, producer=number), Receipt)
        assert_type(store.checkpoint_append("t", [], run, expected_version=0, producer=number), Receipt)
        store.load_checkpoint("t", consistency=Consistency.STRONG)
        store.load_thread("t", at_least=last)
        store.load_messages("t", quarantined="known")
        assert_type(store.load_run("r", quarantined="known"), Run | None)
        store.latest_run("t", at_least=last)
        store.load_thread_state("t", at_least=last)
        assert_type(store.query_messages("t", consistency=Consistency.STRONG), MessagePage)
        store.load_message("t", "m", consistency=Consistency.STRONG)
        store.load_message_range("t", 1, 2, consistency=Consistency.STRONG)
        store.query_runs(consistency=Consistency.STRONG)
        store.query_threads(consistency=Consistency.STRONG)
        store.save_thread("t")
        store.force_flush_all(timeout_s=1)
        plain: BlockingThreadStore = store
        plain.load_thread("t", at_least=last)  # type: ignore[call-arg]
"""


LANGGRAPH = """
from bufstore import Consistency
from bufstore.langgraph import BufferedSaver, MemoryCheckpointStore
from bufstore.memory import MemoryNats

BufferedSaver.open(MemoryCheckpointStore(), nats=MemoryNats(), consistency=Consistency.STRONG, on_conflict="reject")
BufferedSaver.open(MemoryCheckpointStore(), on_conflict="rejekt")  # type: ignore[arg-type]
BufferedSaver.from_conn_string("postgresql://", cache_bytes=0, new_threads="assume", history="run")
BufferedSaver.from_conn_string("postgresql://", cache_byte=0)  # type: ignore[call-arg]
"""


def check(text: str, folder: Path) -> None:
    (folder / "app.py").write_text(text)
    mypy = [sys.executable, "-m", "mypy", "--strict", str(folder / "app.py")]
    found = subprocess.run(mypy, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stdout + found.stderr


def test_a_blocking_buffered_store_takes_what_a_buffered_store_takes(tmp_path: Path) -> None:
    check(BLOCKING, tmp_path)


@pytest.mark.long
def test_a_blocking_saver_takes_the_options_of_a_saver(tmp_path: Path) -> None:
    check(LANGGRAPH, tmp_path)
    options = inspect.signature(AsyncBufferedSaver.open).parameters.keys() - {"store", "nats"}
    assert SaverOptions.__annotations__.keys() == options
