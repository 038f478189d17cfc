"""The ring of idempotency keys."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bufstore.buffer import recent_keys

KEYS = st.lists(st.integers(0, 40), max_size=60)


def ring_of(keys: list[int]) -> bytes:
    found = b""
    for key in keys:
        found = recent_keys.add(found, recent_keys.item(f"key {key}", b""))
    return found


@given(keys=KEYS)
def test_the_last_sixteen_keys_are_known_and_no_others(keys: list[int]) -> None:
    made = ring_of(keys)
    assert len(made) <= 16 * 12
    for key in range(41):
        known = recent_keys.find(made, recent_keys.item(f"key {key}", b""))
        assert (known is True) == (key in keys[-16:])


@given(older=KEYS, newer=KEYS)
def test_merging_keeps_the_newer_keys_and_as_many_older_ones_as_fit(older: list[int], newer: list[int]) -> None:
    older, newer = list(dict.fromkeys(older)), list(dict.fromkeys(newer))
    merged = recent_keys.merge(ring_of(older), ring_of(newer))
    rest = [key for key in older[-16:] if key not in newer[-16:]]
    assert merged == ring_of([*rest, *newer[-16:]])


def test_a_key_with_other_content_is_told_from_a_repeat() -> None:
    made = recent_keys.add(b"", recent_keys.item("key", b"this"))
    assert recent_keys.find(made, recent_keys.item("key", b"this")) is True
    assert recent_keys.find(made, recent_keys.item("key", b"that")) is False
    assert recent_keys.find(made, recent_keys.item("other", b"this")) is None


def test_an_entry_without_a_key_is_repeated_by_its_id_whatever_the_content() -> None:
    made = recent_keys.add(b"", recent_keys.item(recent_keys.key_of(5), b""))
    assert recent_keys.find(made, recent_keys.item(recent_keys.key_of(5), b"content of the retry")) is True
    assert recent_keys.find(made, recent_keys.item(recent_keys.key_of(6), b"content of the retry")) is None


def test_the_ring_of_an_entry_merged_with_the_one_it_was_built_on_is_itself() -> None:
    for n in range(40):
        before, after = ring_of(list(range(n))), ring_of(list(range(n + 1)))
        assert recent_keys.merge(before, after) == after
