"""Which releases work with which tables, and that every migration says so."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bufstore.postgres.connection.migrate import oldest_release, works_with

#: Folders of migrations, and the newest of each from before migrations said which releases work with them.
PARTS = {
    ("bufstore.postgres.ledger", "sql"): 6,
    ("bufstore.threads.postgres", "sql"): 3,
    ("bufstore.mailbox", "sql"): 3,
    ("bufstore.spark", "sql"): 1,
}


def test_a_migration_says_which_releases_still_work_or_shuts_them_out() -> None:
    assert oldest_release("-- What it is for.\n-- Works with: 0004\nSELECT 1", 6) == 4
    assert oldest_release("-- What it is for.\nSELECT 1", 6) == 6


@pytest.mark.parametrize(
    ("applied", "newest_known", "works"),
    [
        ({}, 3, True),
        ({1: 1, 2: 2, 3: 3}, 3, True),
        ({1: 1, 2: 2}, 3, True),
        ({1: 1, 2: 1}, 1, True),
        ({1: 1, 2: 2}, 1, False),
        ({1: 1, 2: 1, 3: 2}, 1, False),
        ({1: 1, 2: 1, 3: 2}, 2, True),
        ({1: 1, 2: 2, 3: 1}, 1, False),
    ],
)
def test_a_release_works_with_newer_tables_if_all_that_it_does_not_know_allow_it(
    applied: dict[int, int], newest_known: int, works: bool
) -> None:
    assert works_with(applied, newest_known) is works


@given(st.lists(st.integers(1, 30), min_size=1, max_size=30), st.integers(1, 30))
def test_a_release_that_works_is_followed_by_releases_that_work(said: list[int], newest_known: int) -> None:
    applied = {version: min(oldest, version) for version, oldest in enumerate(said, 1)}
    if works_with(applied, newest_known):
        assert works_with(applied, newest_known + 1)
    assert works_with(applied, max(applied))


@pytest.mark.parametrize(("package", "folder"), PARTS)
def test_every_new_migration_says_which_releases_work_with_it(package: str, folder: str) -> None:
    for file in (files(package) / folder).iterdir():
        numbered = re.fullmatch(r"(\d{4})_.+\.sql", file.name)
        if numbered and int(numbered[1]) > PARTS[package, folder]:
            text = file.read_text(encoding="utf-8")
            assert "-- Works with: " in text, f"{file.name} names no oldest release: `-- Works with: NNNN`"
            assert oldest_release(text, 0) in range(1, int(numbered[1]) + 1), file.name
