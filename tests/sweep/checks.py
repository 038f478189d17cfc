"""What must hold after any crash.

The rules of `chaos.checkers` judge threads that only grow. This module has the rules for quarantine and deletions, and
checks what Postgres, log and flusher report in the end.
"""

from __future__ import annotations

from typing import Any

from bufstore import BufferedThreadStore, Consistency
from bufstore.buffer.entry import StoredEntry
from chaos import checkers
from chaos.history import EDITED, SHARED, Final, History, ThreadHistory

_RULES = (
    checkers.lost, checkers.duplicated, checkers.phantom, checkers.reordered, checkers.not_a_past_state, checkers.stale,
    checkers.flicker,
)  # fmt: skip


async def violations(store: BufferedThreadStore, past: History) -> list[str]:
    """Describe everything that is wrong; empty if nothing acknowledged is lost, doubled, reordered or half done."""
    await store.force_flush_all(timeout_s=60)
    messages = {t: await _flushed(store, t) or [] for t in past.threads}
    found: list[str] = []
    for thread_id, h in past.threads.items():
        parked = await _parked(store, thread_id)
        if thread_id.startswith("poisoned"):
            found += _poisoned(thread_id, h, messages[thread_id], parked)
        elif parked:
            found.append(f"{thread_id}: {len(parked)} entries are in quarantine for no reason")
        if (await store.load_messages(thread_id, quarantined="known") or []) != messages[thread_id]:
            found.append(f"{thread_id}: a joined read shows what Postgres does not, though all is flushed")
    shared = {t: h for t, h in past.threads.items() if t.startswith(SHARED)}
    final = Final({t: messages[t] for t in shared})
    found += [str(v) for rule in _RULES for v in rule(History(shared), final)]
    found += _families(past, messages)
    found += [f"verify: {finding}" for finding in (await store.verify()).findings]
    state: Any = (await store.statistics()).flusher
    if state.trouble:
        found.append(f"the flusher says: {state.trouble}")
    return found


async def _flushed(store: BufferedThreadStore, thread_id: str) -> list[str] | None:
    return await store.load_messages(thread_id, consistency=Consistency.EVENTUAL)


async def _parked(store: BufferedThreadStore, thread_id: str) -> dict[int, bytes]:
    parked = {}
    for info in await store.quarantine.page(thread_id=thread_id):
        item = (await store.quarantine.show(info.seq)).item
        assert isinstance(item, StoredEntry)
        parked[info.seq] = item.entry.payload
    return parked


def _poisoned(thread_id: str, h: ThreadHistory, flushed: list[str], parked: dict[int, bytes]) -> list[str]:
    """Each acknowledged entry is either applied or in quarantine; in neither only if a discard of it was begun."""
    given_up = {int(n) for o in h.ops if o.kind == "discard" for n in o.names}
    wrong = []
    for op in h.ops:
        if op.kind == "append" and op.ok:
            places = (op.names[0] in flushed) + (op.names[0].encode() in parked.get(op.seq, b""))
            if places != 1 and not (places == 0 and op.seq in given_up):
                wrong.append(f"{thread_id}: {op.names[0]} (position {op.seq}) is in {places} places")
    if len(set(flushed)) < len(flushed):
        wrong.append(f"{thread_id}: something took effect twice: {flushed}")
    return wrong


def _families(past: History, messages: dict[str, list[str]]) -> list[str]:
    """A deletion removed a whole family or nothing, and a thread that was created again after it stays."""
    wrong: list[str] = []
    for deletion in (o for h in past.threads.values() for o in h.ops if o.kind == "delete"):
        old = [t for t in deletion.names if messages.get(t) == ["old"]]
        if deletion.ok and old:
            wrong.append(f"{old} are still there after the acknowledged deletion of {deletion.thread}")
        if not deletion.ok and 0 < len(old) < len(deletion.names):
            wrong.append(f"the deletion of {deletion.thread} is half done: {old} are still there")
        anew = [o for o in past.threads[deletion.thread].ops if o.names == ("new",) and o.ok]
        if anew and messages[deletion.thread] != ["new"]:
            wrong.append(f"{deletion.thread} was made anew, and holds {messages[deletion.thread]}")
    begun = {t for h in past.threads.values() for o in h.ops if o.kind == "delete" for t in o.names}
    for thread_id, h in past.threads.items():
        kept = thread_id.startswith(EDITED) and thread_id not in begun and any(o.ok for o in h.ops)
        if kept and messages[thread_id] != ["old"]:
            wrong.append(f"{thread_id} was made, never deleted, and holds {messages[thread_id]}")
    return wrong
