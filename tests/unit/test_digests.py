"""What a writer remembers of a thread's messages, compared with the list itself."""

from __future__ import annotations

from array import array
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bufstore.threads.digests import MessageMemory, digests_of, ids_of, ids_of_encoded
from bufstore.threads.model import encode_messages
from thorough import examples

IDS = st.sampled_from(["a", "b", "c", None, 5, ""])
#: Keys need not be str.
KEYS = st.sampled_from(["c", 7])
MESSAGES = st.lists(st.integers(0, 3) | st.builds(lambda i, key: {"id": i, key: 1}, IDS, KEYS), max_size=6)


def parts(messages: list[Any]) -> tuple[array[int], array[int]]:
    encoded = encode_messages(messages)
    assert ids_of(messages) == ids_of_encoded(encoded)
    return digests_of(encoded), ids_of(messages)


def check(memory: MessageMemory, model: list[Any]) -> None:
    digests, ids = parts(model)
    assert memory.digests == digests
    assert memory.ids == ids
    assert memory.weight == 1 + len(model)
    for id_ in ("a", "b", "c", "d", ""):
        known = any(isinstance(m, dict) and m["id"] == id_ for m in model)
        assert memory.has_id(ids_of([{"id": id_}])[0]) == known


@examples(150)
@given(steps=st.lists(st.tuples(st.floats(0, 1), MESSAGES, st.booleans(), st.booleans()), max_size=8))
def test_replacing_and_undoing_is_what_it_is_for_a_list(steps: list[tuple[float, list[Any], bool, bool]]) -> None:
    memory, model = MessageMemory(), list[Any]()
    undone: list[tuple[int, Any, list[Any]]] = []
    for where, new, look, undo in steps:
        keep = round(where * len(model))
        before = list(model)
        removed = memory.replace(keep, *parts(new))
        model = model[:keep] + new
        undone.append((keep, removed, before))
        if look:
            check(memory, model)
        if undo:
            while undone:
                keep, removed, model = undone.pop()
                memory.replace(keep, *removed)
                if look:
                    check(memory, model)
    check(memory, model)


@given(first=MESSAGES, second=MESSAGES)
def test_common_is_the_length_of_the_shared_beginning(first: list[Any], second: list[Any]) -> None:
    memory = MessageMemory(*parts(first))
    expected = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    assert memory.common(parts(second)[0]) == (min(len(first), len(second)) if expected is None else expected)


def test_a_message_edited_in_place_is_not_taken_for_the_same() -> None:
    messages = [{"id": "a", "content": "x"}, {"id": "b", "content": "y"}]
    memory = MessageMemory(*parts(messages))
    messages[1]["content"] = "z"
    assert memory.common(parts(messages)[0]) == 1


def test_values_that_only_look_equal_are_different_messages() -> None:
    memory = MessageMemory(*parts([1, 0, "a", None]))
    for other in (True, 1.0, "1"):
        assert memory.common(parts([other])[0]) == 0
    assert memory.common(parts([1, False])[0]) == 1
    assert memory.common(parts([1, 0, b"a"])[0]) == 2
