"""Functions whose texts name the schema, as migrations make them."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from bufstore.postgres.connection.functions import functions_of

FOLDERS = ["bufstore.postgres.ledger", "bufstore.threads.postgres", "bufstore.mailbox", "bufstore.spark"]


def texts(package: str) -> list[str]:
    found = sorted((files(package) / "sql").iterdir(), key=lambda file: file.name)
    return [file.read_text(encoding="utf-8") for file in found if re.match(r"\d{4}_", file.name)]


@pytest.mark.parametrize("package", FOLDERS)
def test_every_function_that_names_the_schema_can_be_made_again(package: str) -> None:
    found = functions_of(texts(package))
    made = {name for text in texts(package) for name in re.findall(r"CREATE.* FUNCTION \{schema\}\.(\w+)", text)}
    assert made - found.keys() <= {"run_taken"}, "its text is the same in every schema"
    for name, statement in found.items():
        head, body, end = statement.split("$body$")
        assert head.startswith(f"CREATE OR REPLACE FUNCTION {{schema}}.{name}(")
        assert not end
        assert len(re.findall(r" \{schema\}\.", body)) == body.count("{schema}"), "see functions._ELSEWHERE"


def test_the_last_migration_says_how_a_function_is() -> None:
    first = (
        "CREATE FUNCTION {schema}.f() RETURNS int LANGUAGE sql AS $body$ SELECT 1 FROM {schema}.t $body$;\nSELECT 1;"
    )
    last = first.replace("CREATE", "CREATE OR REPLACE").replace("SELECT 1 FROM", "SELECT 2 FROM")
    other = "CREATE FUNCTION {schema}.g() RETURNS int LANGUAGE sql AS $body$ SELECT 1 $body$;"
    assert functions_of([first + other, last]) == {"f": last.removesuffix(";\nSELECT 1;")}
