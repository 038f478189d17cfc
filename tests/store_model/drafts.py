"""Random calls for a model test."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from bufstore.threads.lineage import Children
from bufstore.threads.model import Run, RunStatus, ThreadMetadata, decode_message
from bufstore.types import Receipt
from store_model.calls import Call, Witness
from store_model.world import THREADS, Instance, World


class Drafts:
    """A world, and calls that fit it; all randomness comes from the given `chance`."""

    def __init__(self, seed: int, lanes: int = 1) -> None:
        self.world = World(seed, lanes)
        self.witness = Witness(self.world)
        self._number = 0
        self._receipts: dict[str, Receipt] = {}

    async def _make(self, chance: random.Random, call: Call) -> None:
        await asyncio.sleep(chance.choice((0, 0, 0.01)))
        await self.witness.make(self._instance(chance), call)
        if call.receipt is not None:
            known = self._receipts.get(call.thread_id)
            if known is None or known.thread_seq < call.receipt.thread_seq:
                self._receipts[call.thread_id] = call.receipt

    def _instance(self, chance: random.Random) -> Instance:
        up = [i for i in self.world.instances if i.store is not None]
        return chance.choice(up or self.world.instances)

    def _call(self, chance: random.Random, thread_id: str) -> Call:
        kinds = [self._checkpoint] * 5 + [self._checkpoint_append] * 5 + [self._edit] * 6 + [self._lineage] * 2
        return chance.choice(kinds)(chance, thread_id)

    def _messages(self, chance: random.Random, count: int) -> list[Any]:
        messages: list[Any] = []
        for _ in range(count):
            self._number += 1
            size = chance.choice((1, 1, 1, 1, 5000))  # 5000 characters take several messages of the log
            messages.append({"id": f"m{self._number}", "text": "x" * size})
        return messages

    def _run(self, chance: random.Random, thread_id: str) -> Run:
        self._number += 1
        number = chance.choice(("1", "2", "3"))
        return Run(
            run_id=f"run-{number}-of-{thread_id}",
            thread_id=thread_id,
            status=chance.choice(list(RunStatus)),
            steps=self._number,
        )

    def _known(self, thread_id: str) -> list[Any]:
        """The thread's messages, as far as the archive has been read."""
        story = self.world.archive.story(thread_id)
        return [decode_message(m) for m in story.shown(self.world.flushed(thread_id), story.end).seen.messages]

    def _checkpoint(self, chance: random.Random, thread_id: str) -> Call:
        known = self._known(thread_id)
        keep = chance.choice((len(known), len(known), max(0, len(known) - 1), 0))
        messages = known[:keep] + self._messages(chance, chance.choice((0, 1, 2)))
        return self._saving("checkpoint", chance, thread_id, messages, {})

    def _checkpoint_append(self, chance: random.Random, thread_id: str) -> Call:
        options: dict[str, Any] = {}
        if chance.random() < 0.4:
            options["expected_version"] = len(self._known(thread_id)) + chance.choice((0, 0, 0, 1))
        messages = self._messages(chance, chance.choice((0, 1, 2)))
        if chance.random() < 0.1:
            messages += self._known(thread_id)[-1:]
        return self._saving("checkpoint_append", chance, thread_id, messages, options)

    def _saving(
        self, kind: str, chance: random.Random, thread_id: str, messages: list[Any], options: dict[str, Any]
    ) -> Call:
        run = self._run(chance, thread_id)
        key = f"key {self._number}" if chance.random() < 0.3 else None

        async def do(store: Any, key: str | None) -> Receipt:
            receipt: Receipt = await getattr(store, kind)(thread_id, messages, run, idempotency_key=key, **options)
            return receipt

        return Call(kind, thread_id, do, key)

    def _edit(self, chance: random.Random, thread_id: str) -> Call:
        kind = chance.choice(
            ("create_run", "save_thread", "update_metadata", "save_thread_state", "append_messages", "delete_messages")
        )
        self._number += 1
        arguments: list[Any] = [thread_id]
        match kind:
            case "create_run":
                arguments = [
                    Run(run_id=f"run-{self._number % 7}-of-{thread_id}", thread_id=thread_id, steps=self._number)
                ]
            case "save_thread" | "update_metadata":
                arguments.append(ThreadMetadata(title=str(self._number), resource_id=chance.choice((None, "a"))))
            case "save_thread_state":
                arguments.append({"number": self._number})
            case "append_messages":
                arguments.append(self._messages(chance, chance.choice((0, 1, 2))))
            case "delete_messages":
                ids = [m["id"] for m in self._known(thread_id)]
                arguments.append(chance.choice((None, ids[-1:], ids[:1], ["nobody"])))

        async def do(store: Any, key: str | None) -> Receipt:
            receipt: Receipt = await getattr(store, kind)(*arguments)
            return receipt

        return Call(kind, thread_id, do)

    def _lineage(self, chance: random.Random, thread_id: str) -> Call:
        if chance.random() < 0.6:
            parent = chance.choice((None, *(t for t in THREADS if t != thread_id)))

            async def set_parent(store: Any, key: str | None) -> Receipt:
                receipt: Receipt = await store.set_parent(thread_id, parent)
                return receipt

            return Call("set_parent", thread_id, set_parent, parent_thread_id=parent)
        children = chance.choice(list(Children))

        async def delete(store: Any, key: str | None) -> Receipt:
            receipt: Receipt = await store.delete_thread(thread_id, children=children)
            return receipt

        return Call("delete_thread", thread_id, delete, children=children)
