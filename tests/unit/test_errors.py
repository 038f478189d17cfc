"""Errors as values: they are sent to other processes, and copied."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

from bufstore import errors
from bufstore.errors import BufstoreError, VersionConflict

KINDS: list[type[Any]] = [e for e in vars(errors).values() if inspect.isclass(e) and issubclass(e, BufstoreError)]
#: Values for an error's arguments, by type.
VALUES = {"str": "word", "int": 7, "object": {"any": 1}, "str | None": "other", "int | None": 3}


def made(kind: type[Any]) -> Any:
    if kind.__init__ is Exception.__init__:
        return kind("what happened", 5)
    asked = inspect.signature(kind).parameters.values()
    positional = [VALUES[p.annotation] for p in asked if p.kind is not p.KEYWORD_ONLY]
    return kind(*positional, **{p.name: VALUES[p.annotation] for p in asked if p.kind is p.KEYWORD_ONLY})


def pickled(error: BufstoreError) -> Any:
    return pickle.loads(pickle.dumps(error))


@pytest.mark.parametrize("again", [pickled, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_that_is_pickled_or_copied_is_the_same(kind: type[Any], again: Callable[[BufstoreError], Any]) -> None:
    error = made(kind)
    error.add_note("a note")
    same = again(error)
    assert type(same) is kind
    assert (str(same), same.args, vars(same)) == (str(error), error.args, vars(error))
    assert same.__cause__ is None


def test_an_error_of_a_process_pool_is_raised_and_the_pool_goes_on() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with pytest.raises(VersionConflict, match="'t' has version 2, expected 1") as refused:
            pool.submit(conflict).result(timeout=60)
        assert (refused.value.thread_id, refused.value.expected, refused.value.actual) == ("t", 1, 2)
        assert pool.submit(abs, -1).result(timeout=60) == 1


def conflict() -> None:
    raise VersionConflict("t", expected=1, actual=2)
