"""Subjects: no id can be taken for another id, a wildcard, or the end of a line."""

from __future__ import annotations

import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore.buffer.subjects import Subjects
from bufstore.errors import MalformedEntry
from bufstore.jetstream.subject_tokens import token, untoken

SUBJECTS = Subjects("thread", 8)
HOSTILE = [
    "*", ">", "a.b", "a b", ".", "..", "thread.>", "\r\n", "\t", "a\r\nPUB x 0", "$JS.API.>", "_", "-", "=", "==", "/",
    "+", "é", unicodedata.normalize("NFD", "é"), "É", "e", "E", "ａ", "a", "A", "ß", "ss", "\u202e", "\ufeff", "🧵",
    "\x7f",    " ", "  ", "%", "'", '"', "\\", "\x01", "a" * 1024, "a" * 1023, "\U0010ffff", "ﬀ", "ff", "İ", "i̇",
]  # fmt: skip
IDS = st.text(min_size=1, max_size=60).filter(lambda s: not any("\ud800" <= c <= "\udfff" for c in s))


@given(id_=IDS | st.sampled_from(HOSTILE))
def test_a_token_is_plain_and_gives_the_id_back(id_: str) -> None:
    text = token(id_)
    assert re.fullmatch(r"[A-Za-z0-9_-]+", text)
    assert untoken(text) == id_
    assert SUBJECTS.thread_id(SUBJECTS.of(id_)) == id_
    assert 0 <= SUBJECTS.partition(id_) < 8


def test_ids_that_look_alike_have_different_subjects() -> None:
    assert len({SUBJECTS.of(id_) for id_ in HOSTILE}) == len(HOSTILE)
    assert len({SUBJECTS.of(id_).lower() for id_ in ("a", "A")}) == 2


@given(text=st.text(max_size=12) | st.from_regex(r"[A-Za-z0-9_-]{0,9}=?=?", fullmatch=True))
def test_only_what_token_makes_is_a_token(text: str) -> None:
    try:
        id_ = untoken(text)
    except MalformedEntry:
        return
    assert token(id_) == text


@pytest.mark.parametrize("text", ["YQ==", "YQ=", "YR", "Y", "_w", "a+b/", "YQ\n", " YQ", "YQ ", "é", "\ud800", "7aCA"])
def test_a_second_spelling_is_no_token(text: str) -> None:
    with pytest.raises(MalformedEntry):
        untoken(text)


@given(subject=st.text(max_size=30) | st.from_regex(r"thread\.[0-9]{1,2}\.[A-Za-z0-9_-]{0,6}(\.x)?", fullmatch=True))
def test_only_a_threads_own_subject_names_it(subject: str) -> None:
    try:
        id_ = SUBJECTS.thread_id(subject)
    except MalformedEntry:
        return
    assert SUBJECTS.of(id_) == subject


@pytest.mark.parametrize("change", ["thread.{p}.{t}.x", "other.{p}.{t}", "thread.0{p}.{t}", "thread.{q}.{t}", "thread"])
def test_a_subject_of_elsewhere_is_malformed(change: str) -> None:
    p = SUBJECTS.partition("some id")
    with pytest.raises(MalformedEntry):
        SUBJECTS.thread_id(change.format(p=p, q=(p + 1) % 8, t=token("some id")))


def test_the_empty_id_has_no_subject() -> None:
    with pytest.raises(MalformedEntry):
        SUBJECTS.thread_id("thread.0.")


def test_partitions_stay_where_they_are_in_every_release() -> None:
    assert [SUBJECTS.partition(t) for t in ("a", "b", "thread-1", "é")] == [3, 1, 1, 6]
