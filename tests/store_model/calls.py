"""Writing calls, and the witness that compares each entry of the log with them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from bufstore.buffer.entry import Malformed, StoredEntry
from bufstore.errors import (
    BufstoreError,
    LineageError,
    LogFull,
    OutcomeUnknown,
    Rejected,
    ThreadQuarantined,
)
from bufstore.threads.lineage import Children
from bufstore.threads.payload import AnyPayload, Edit, Removal, decode_payload
from bufstore.types import Receipt
from store_model.story import Seen, Story, seen_in, store_with, told
from store_model.world import CONFIG, THREADS, Instance, Violation, World

#: The longest time of a call: the run's claim, the parent's check, the append; a change of lineage has its own limit.
_LONGEST_S = CONFIG.flush_timeout_s + 2 * CONFIG.append_timeout_s + CONFIG.read_timeout_s + 1


@dataclass(eq=False)
class Call:
    """One writing call, from its start until its outcome is known."""

    kind: str
    thread_id: str
    #: Makes the call on the given store, with the idempotency key if the call takes one.
    do: Callable[[Any, str | None], Awaitable[Receipt]]
    key: str | None = None
    parent_thread_id: str | None = None
    children: Children | None = None
    #: The end of the thread's log when the call began and when it ended.
    began: int = 0
    ended: int = 0
    began_at: float = 0.0
    outcome: str = "running"
    error: BaseException | None = None
    receipt: Receipt | None = None
    #: The positions of its entries; a change of lineage may be written again.
    entries: list[int] = field(default_factory=list)

    @property
    def lineage(self) -> bool:
        return self.kind in ("set_parent", "delete_thread")

    def meant(self, before: Seen) -> Seen | type[BaseException]:
        """The thread as the call leaves it, or the error that refuses the call."""
        store = store_with(self.thread_id, before, THREADS)
        try:
            _drive(self.do(store, None))
        except Rejected as e:
            return type(e)
        return seen_in(store, self.thread_id)

    def explains(self, thread_id: str, payload: AnyPayload, before: Seen) -> bool:
        """Whether the call may have written this entry."""
        if self.kind == "delete_thread":
            if isinstance(payload, Removal):
                return thread_id == self.thread_id or self.children is Children.CASCADE
            detached = isinstance(payload, Edit) and payload.parent == (None,)
            return detached and self.children is Children.DETACH
        return thread_id == self.thread_id and self.meant(before) == told(before, thread_id, payload)


class Witness:
    """Knows all calls, and reads the archive as it grows."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.calls: list[Call] = []
        self._of_id: dict[int, Call] = {}

    async def make(self, instance: Instance, call: Call) -> None:
        """Make the call in a process, and note its outcome."""
        world = self._world
        store = instance.store
        if store is None:
            return
        first = call.outcome == "running"
        if first:
            self.calls.append(call)
            call.began, call.began_at = world.log_end(call.thread_id), world.loop.time()
        before, still = world.loop.time(), world.stood_still
        task = instance.call(_awaited(call, store))
        try:
            receipt = await task
        except OutcomeUnknown as e:
            self._ended(call, "unknown", e)
            if call.kind.startswith("checkpoint"):  # other calls take no key
                call.key = e.token
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            self._ended(call, "unknown", None)
        except Rejected as e:
            self._rejected(call, e, first)
        except BufstoreError as e:
            world.excuse(e, since=before)
            # The first attempt may still be stored.
            self._ended(call, "unavailable" if first else "unknown", e)
        else:
            self._done(call, receipt)
        if world.loop.time() - before - (world.stood_still - still) > _LONGEST_S:
            raise Violation(f"{call.kind} took {world.loop.time() - before:.1f} s")

    def _ended(self, call: Call, outcome: str, error: BaseException | None) -> None:
        call.ended, call.error = self._world.log_end(call.thread_id), error
        call.outcome = outcome
        self._world.counts[f"{call.kind} {outcome}"] += 1

    def _done(self, call: Call, receipt: Receipt) -> None:
        again = call.outcome != "running"
        self._ended(call, "done", None)
        call.receipt = receipt
        if not receipt.repeated and not call.lineage:
            if self._of_id.setdefault(receipt.id, call) is not call:
                raise Violation(f"two calls have the receipt {receipt}")
        elif receipt.repeated and not again and call.key is None:
            raise Violation(f"{call.kind} without a key is said to be repeated")

    def _rejected(self, call: Call, error: Rejected, first: bool) -> None:
        self._ended(call, "rejected" if first else "unknown", error)
        if isinstance(error, LogFull):
            self._world.excuse(error, since=call.began_at)

    # --- the archive

    def audit(self) -> None:
        """Each new entry must belong to one call, each call that is done be stored, each refusal have a reason."""
        for story, item in self._world.archive.news():
            if isinstance(item, Malformed):
                continue
            fate = story.fate[item.seq]
            if fate == "superseded":
                # A copy that landed after the entries that overtook it were purged has no effect.
                done = self._of_id.get(item.entry.id)
                if done is not None and done.receipt is not None and done.receipt.thread_seq == item.seq:
                    raise Violation(f"entry {item.seq} of {done.kind} on {story.thread_id} is done and superseded")
                continue
            call = self._caller(story, item)
            if call.entries and not call.lineage:
                raise Violation(f"{call.kind} on {call.thread_id} is in the log twice: {call.entries}, {item.seq}")
            call.entries.append(item.seq)
            if fate == "parked" and not story.tainted:
                raise Violation(f"entry {item.seq} of {call.kind} on {story.thread_id} will be parked for no reason")
        for call in self.calls:
            self._check_end(call)
        # A finished change of lineage may be carried out again by a process that finds it unmarked.
        self.calls = [
            c
            for c in self.calls
            if (c.outcome in ("running", "unknown") and (c.lineage or not c.entries))
            or (c.lineage and c.outcome == "done" and c.ended >= self._world.log_end(c.thread_id) - 50)
        ]

    def _caller(self, story: Story, item: StoredEntry) -> Call:
        base, payload = story.base_of(item), decode_payload(item.entry.payload)
        call = self._of_id.get(item.entry.id)
        if call is not None:
            if not call.explains(story.thread_id, payload, base):
                raise Violation(f"{call.kind} on {base} wrote {payload}, which means {call.meant(base)}")
            return call
        for call in self.calls:
            if call.outcome in ("rejected", "unavailable"):
                continue
            if (call.lineage or not call.entries) and call.explains(story.thread_id, payload, base):
                if call.outcome == "done" and not call.lineage and not (call.receipt and call.receipt.repeated):
                    continue
                return call
        raise Violation(f"entry {item.seq} of {story.thread_id} is nobody's: {payload}")

    def _check_end(self, call: Call) -> None:
        story = self._world.archive.story(call.thread_id)
        if call.outcome == "done":
            receipt = call.receipt
            assert receipt is not None
            if call.lineage:
                self._check_lineage(call, story)
            elif not call.entries:
                if not receipt.repeated:
                    raise Violation(f"{call.kind} has the receipt {receipt}, and the log no such entry")
                if not story.tainted:
                    raise Violation(f"{call.kind} on {call.thread_id} is said to be repeated, and was never stored")
            elif not receipt.repeated and call.entries != [receipt.thread_seq]:
                raise Violation(f"{call.kind} is at {call.entries}, the receipt says {receipt}")
            elif not receipt.repeated and not call.began < receipt.thread_seq <= call.ended:
                raise Violation(f"{call.kind} lasted from {call.began} to {call.ended}, its entry is at {receipt}")
        elif call.outcome == "rejected":
            self._check_refusal(call, story)

    def _check_lineage(self, call: Call, story: Story) -> None:
        for seq in story.between(call.began, call.ended):
            thread = story.at(seq).seen.thread
            if thread is None or (call.kind == "set_parent" and thread.parent_thread_id == call.parent_thread_id):
                return
        if not story.tainted:
            raise Violation(f"{call.kind} on {call.thread_id} is done, and there is no sign of it")

    def _check_refusal(self, call: Call, story: Story) -> None:
        error = call.error
        if isinstance(error, (LogFull, LineageError)):
            return
        if story.tainted:
            return
        if isinstance(error, ThreadQuarantined):
            # A child's quarantine also stops a call that would detach the child.
            if call.lineage and any(s.tainted for s in self._world.archive.stories.values()):
                return
            raise Violation(f"{call.thread_id} is not in quarantine: {error}")
        points = story.between(call.began, call.ended)
        if not any(call.meant(story.at(seq).seen) is type(error) for seq in points):
            states = [(seq, story.at(seq).seen.thread) for seq in points]
            raise Violation(
                f"{call.kind} on {call.thread_id} between {call.began} and {call.ended} was refused for no reason: "
                f"{error!r}; {states}"
            )


async def _awaited(call: Call, store: Any) -> Receipt:
    return await call.do(store, call.key)


def _drive(work: Any) -> Any:
    """Run a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as e:
        return e.value
    raise AssertionError("a memory store waits for nothing")
