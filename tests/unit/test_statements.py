"""The files of named statements: no statement in them can be lost, run twice or sent with another."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from bufstore.postgres.connection.migrate import migrations_of, queries

FOLDERS = [
    files(package) / "sql"
    for package in (
        "bufstore.postgres.ledger",
        "bufstore.threads.postgres",
        "bufstore.mailbox",
        "bufstore.spark",
        "bufstore.langgraph.postgres",
    )
]

GOOD = """\
-- name: one
-- What it is for; and why.
SELECT 1
FROM {schema}.t;

-- name: two_2
-- In two
-- lines.
SELECT 2;
"""


def parsed(folder: Path, **texts: str) -> dict[str, str]:
    for name, text in texts.items():
        (folder / f"{name}.sql").write_text(text, encoding="utf-8")
    return dict(queries(folder, 'a"b'))


def test_statements_are_found_by_name_one_by_one_and_without_their_comments(tmp_path: Path) -> None:
    migration = "CREATE TABLE {schema}.t (); INSERT INTO {schema}.t DEFAULT VALUES;\n"
    found = parsed(tmp_path, good=GOOD, other="-- name: three\n-- More.\nSELECT 3;", **{"0001_t": migration})
    assert found == {"one": 'SELECT 1\nFROM "a""b".t', "two_2": "SELECT 2", "three": "SELECT 3"}
    assert migrations_of(tmp_path, "s") == {1: migration.replace("{schema}", '"s"')}


@pytest.mark.parametrize(
    "broken",
    [
        "",
        "SELECT 1;",
        "-- What it is for.\nSELECT 1;",
        "-- name: a\nSELECT 1;",
        "-- name: a\n--\nSELECT 1;",
        "-- name: a b\n-- Text.\nSELECT 1;",
        "-- name: A\n-- Text.\nSELECT 1;",
        "--name: a\n-- Text.\nSELECT 1;",
        "-- name: a\n-- name: b\n-- Text.\nSELECT 1;",
        "-- name: a\n-- Text.",
        "-- name: a\n-- Text.\nSELECT 1",
        "-- name: a\n-- Text.\n;",
        "-- name: a\n-- Text.\nSELECT 1; SELECT 2;",
        "-- name: a\n-- Text.\nSELECT 1;\nSELECT 2;",
        "-- name: a\n-- Text.\n\nSELECT 1;",
        "-- name: a\n-- Text.\nSELECT 1;\n-- name: b\n-- Text.\nSELECT 2;",
        "-- name: a\n-- Text.\nSELECT 1\n-- name: b\n-- Text.\nSELECT 2;",
        "-- name: a\n-- Text.\nSELECT 1;\n\n-- A loose remark.",
        "-- name: a\n-- Text.\nSELECT 1;\n\nSELECT 2;",
    ],
)
def test_what_has_another_form_is_an_error(tmp_path: Path, broken: str) -> None:
    with pytest.raises(ValueError, match=r"broken\.sql: expected"):
        parsed(tmp_path, broken=broken)


def test_a_name_stands_for_one_statement_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'one' is the name of another statement"):
        parsed(tmp_path, good=GOOD, other="-- name: one\n-- Again.\nSELECT 3;")


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_every_statement_stands_below_a_sentence(folder: Path) -> None:
    for file in folder.iterdir():
        if file.name.endswith(".sql") and not file.name[0].isdigit():
            for block in file.read_text(encoding="utf-8").split("\n\n"):
                comment = [line for line in block.splitlines() if line.startswith("-- ")][1:]
                assert comment[0][3].isupper(), block
                assert comment[-1].rstrip(")").endswith("."), block
    assert all(";" not in statement for statement in queries(folder, "s").values())
    assert min(migrations_of(folder, "s"), default=1) == 1  # LangGraph's tables have no migrations of ours
