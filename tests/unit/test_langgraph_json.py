"""The JSON of a checkpoint's row equals that of Python's own encoder."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore.errors import InvalidRecord
from bufstore.langgraph.payload import holds_nul
from bufstore.langgraph.serialize import _JSON, json_of

KEYS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.tuples()
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=2) | st.datetimes(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
    max_leaves=8,
)


@given(VALUES)
def test_it_is_what_the_standard_library_makes(value: Any) -> None:
    try:
        text = _JSON.encode(value).encode()
    except (TypeError, ValueError):
        text = None
    if text is None or holds_nul(text):
        with pytest.raises(InvalidRecord):
            json_of(value, "it")
    else:
        assert json_of(value, "it") == text


@pytest.mark.parametrize("inner", ["[" * 500, 7], ids=["brackets in a text", "a number"])
def test_what_not_every_reader_could_decode_is_refused(inner: Any) -> None:
    """A writer's stack may have room for what a reader's has none for, and a list of all threads reads it, too."""

    def nested(depth: int) -> Any:
        value = inner
        for n in range(depth):
            value = [value] if n % 2 else {"a": value}
        return value

    assert json.loads(json_of(nested(200), "it")) == nested(200)
    with pytest.raises(InvalidRecord, match="nested deeper than 200"):
        json_of(nested(201), "it")


def test_a_text_of_json_is_no_depth() -> None:
    assert json.loads(json_of({"document": "[{" * 1000}, "it")) == {"document": "[{" * 1000}
    wide = [[n] for n in range(1000)]
    assert json.loads(json_of(wide, "it")) == wide


def test_what_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(InvalidRecord):
        json_of(value, "it")
