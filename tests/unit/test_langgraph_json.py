"""The JSON of a checkpoint's row equals that of Python's own encoder."""

from __future__ import annotations

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


def test_what_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(InvalidRecord):
        json_of(value, "it")
