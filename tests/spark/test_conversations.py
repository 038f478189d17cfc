"""Real conversations, streamed as JSON files through the sink: each checkpoint once, each message unchanged."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from bufstore.spark import SinkConfig, checkpoint_sink
from conftest import Deployment
from spark.jobs import ended, prepared, put, read_options, stream, uncommit

_FILES = 4


@pytest.mark.long
async def test_real_conversations_arrive_once_and_bit_for_bit(
    spark: Any, deployment: Deployment, config: SinkConfig, conversations_file: Path, tmp_path: Path
) -> None:
    await prepared(deployment)
    with gzip.open(conversations_file, "rt") as lines:
        conversations = {c["thread_id"]: c["messages"] for c in map(json.loads, lines)}
    rows = [
        {"thread_id": t, "run_id": f"run-{t}", "delta": [json.dumps(message)], "position": n}
        for t, messages in conversations.items()
        for n, message in enumerate(messages)
    ]
    rows.sort(key=lambda row: row["position"])
    assert len(rows) == 5308
    size = -(-len(rows) // _FILES)
    for batch in range(_FILES):
        put(tmp_path / "in", f"{batch}.json", rows[batch * size : (batch + 1) * size])
    await ended(stream(spark, tmp_path / "in", tmp_path / "ck", checkpoint_sink(config)))
    uncommit(tmp_path / "ck", _FILES - 1)
    await ended(stream(spark, tmp_path / "in", tmp_path / "ck", checkpoint_sink(config)))
    found = spark.read.format("threadlog").options(**read_options(deployment, columns="thread_id, keep")).load()
    assert await asyncio.to_thread(found.count) == 5308
    async with deployment.store() as store:
        await store.force_flush_all()
    async with deployment.inner() as inner:
        for thread_id, messages in conversations.items():
            assert await inner.load_messages(thread_id) == messages
