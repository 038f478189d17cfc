"""What must hold after any crash, whatever was asked for before it."""

from __future__ import annotations

from typing import Any

from bufstore import BufferedThreadStore, Consistency
from bufstore.buffer.entry import StoredEntry
from sweep.record import Operation, Past


async def violations(store: BufferedThreadStore, past: Past) -> list[str]:
    """Everything that is wrong, in words; empty when nothing acknowledged is lost, doubled, reordered or half done."""
    await store.force_flush_all(timeout_s=60)
    found = [*(await _appends(store, past)), *(await _families(store, past))]
    report = await store.verify()
    found += [f"verify: {finding}" for finding in report.findings]
    state: Any = (await store.statistics()).flusher
    if state.trouble:
        found.append(f"the flusher says: {state.trouble}")
    return found


async def _appends(store: BufferedThreadStore, past: Past) -> list[str]:
    wrong: list[str] = []
    threads: dict[str, list[Operation]] = {}
    given_up: set[str] = set()
    for o in past.operations.values():
        if o.kind == "append":
            threads.setdefault(o.thread_id, []).append(o)
        elif o.kind == "discard":  # also when it was cut short: it may have happened
            given_up.update(o.values)
    for thread_id, operations in threads.items():
        asked = {o.values[0] for o in operations if not o.refused}
        told = sorted((o for o in operations if o.receipt is not None), key=lambda o: o.receipt or 0)
        whole_quarantine = b"".join((await _parked(store, thread_id)).values())
        flushed = await store.load_messages(thread_id, consistency=Consistency.EVENTUAL) or []
        joined = await store.load_messages(thread_id, quarantined="known") or []
        parked = await _parked(store, thread_id)
        if parked and not thread_id.startswith("poisoned"):
            wrong.append(f"{thread_id}: {len(parked)} entries are in quarantine for no reason")
        if flushed != joined:
            wrong.append(f"{thread_id}: Postgres shows {len(flushed)} messages, a joined read {len(joined)}")
        if len(flushed) != len(set(flushed)):
            wrong.append(f"{thread_id}: an entry took effect twice")
        if not set(flushed) <= asked:
            wrong.append(f"{thread_id}: nobody wrote {sorted(set(flushed) - asked)[:3]}")
        order = [o.values[0] for o in told if o.values[0] in flushed]
        if [m for m in flushed if m in set(order)] != order:
            wrong.append(f"{thread_id}: out of order")
        for o in told:
            value, seq = o.values[0], str(o.receipt)
            kept = (value in flushed) + (value.encode() in parked.get(seq, b""))
            if kept == 0 and seq not in given_up:
                wrong.append(f"{thread_id}: {value} (position {seq}) is lost")
            elif kept > 1:
                wrong.append(f"{thread_id}: {value} is applied and in quarantine")
    return wrong


async def _parked(store: BufferedThreadStore, thread_id: str) -> dict[str, bytes]:
    parked = {}
    for info in await store.quarantine.page(thread_id=thread_id):
        item = (await store.quarantine.show(info.seq)).item
        assert isinstance(item, StoredEntry)
        parked[str(info.seq)] = item.entry.payload
    return parked


async def _families(store: BufferedThreadStore, past: Past) -> list[str]:
    """A deletion has happened to all of a family or to none; what was made anew after it stays."""
    wrong: list[str] = []
    made: dict[str, list[Operation]] = {}
    for o in past.operations.values():
        if o.kind == "create":
            made.setdefault(o.thread_id, []).append(o)
    for deletion in (o for o in past.operations.values() if o.kind == "delete"):
        content = {t: await store.load_messages(t, consistency=Consistency.EVENTUAL) for t in deletion.values}
        old = [t for t, messages in content.items() if messages == ["old"]]
        if deletion.receipt is not None and old:
            wrong.append(f"{old} are still there after the acknowledged deletion of {deletion.thread_id}")
        if deletion.pending and 0 < len(old) < len(deletion.values):
            wrong.append(f"the deletion of {deletion.thread_id} is half done: {old} are still there")
    for thread_id, operations in made.items():
        deleted = any(o.kind == "delete" and thread_id in o.values for o in past.operations.values())
        told = [o.values for o in operations if o.receipt is not None]
        now = await store.load_messages(thread_id, consistency=Consistency.EVENTUAL)
        if told and now not in (told[-1], operations[-1].values) and not (deleted and told[-1] == ["old"] and not now):
            wrong.append(f"{thread_id} holds {now}, not {told[-1]}")
    return wrong
