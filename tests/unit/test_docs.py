"""The documents' claims about tests, checks and errors are true."""

from __future__ import annotations

import re
from pathlib import Path
from pkgutil import resolve_name

from bufstore import errors
from bufstore.mailbox.counters import Counters
from bufstore.testing import APPLY_CHECKS, CHECKS
from conformance import LIVE_MAILBOX_CHECKS, MAILBOX_CHECKS

_ROOT = Path(__file__).parent.parent.parent


def test_every_test_that_the_guarantees_name_exists() -> None:
    documents = ("GUARANTEES.md", "TRACK_RECORD.md", "SPARK.md")
    named = {name for d in documents for name in re.findall(r"`(test_\w+)`", (_ROOT / "docs" / d).read_text())}
    sources = "\n".join(p.read_text() for p in (_ROOT / "tests").rglob("test_*.py"))
    assert named
    assert not {name for name in named if f"def {name}(" not in sources}


def test_every_test_and_check_that_the_tests_readme_names_exists() -> None:
    text = (_ROOT / "tests" / "README.md").read_text()
    # A check's name is a sentence; shorter words are methods and settings.
    named = set(re.findall(r"`(test_\w+|[a-z0-9]+(?:_[a-z0-9]+){2,})`", text))
    sources = "\n".join(p.read_text() for p in (_ROOT / "tests").rglob("test_*.py"))
    checks = {check.name for check in CHECKS + APPLY_CHECKS + MAILBOX_CHECKS + LIVE_MAILBOX_CHECKS}
    assert len(named) > 100
    assert not {n for n in named if not (f"def {n}(" in sources if n.startswith("test_") else n in checks)}


def test_each_of_the_tests_readmes_rows_names_a_test_or_says_why_not() -> None:
    text = (_ROOT / "tests" / "README.md").read_text()
    rows = [line.split(" | ") for line in text.partition("## awaken's")[2].splitlines() if line.startswith("| ")]
    cases = [row for row in rows if not row[-1].startswith("ours") and not row[-1].endswith("the test |")]
    assert len(cases) > 100
    assert not [row for row in cases if "`" not in row[-1] and "no meaning" not in row[-1]]
    # All numbered weaknesses and faults are there, each once.
    numbers = [int(row[0][2:].split()[0]) for row in cases if re.match(r"\| \d", row[0])]
    assert numbers == [*range(1, 33), *range(1, 39)]


def test_every_guarantee_has_a_chapter_that_names_tests() -> None:
    chapters = (_ROOT / "docs" / "GUARANTEES.md").read_text().split("\n## ")
    assert all(any(c.startswith(f"G{n}, ") and "\n* `test_" in c for c in chapters) for n in range(1, 9))


def test_every_error_stands_in_the_tree_and_says_what_to_do() -> None:
    tree = errors.__doc__ or ""
    classes = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.BufstoreError)]
    for error in classes:
        assert f" {error.__name__} " in tree or f"{error.__name__}\n" in tree, error.__name__
        assert error.__doc__


def test_operations_say_what_to_do_about_every_public_error() -> None:
    chapter = (_ROOT / "docs" / "OPERATIONS.md").read_text().partition("## What to do about an error")[2]
    chapter = chapter.partition("\n## ")[0]
    public = {name for name in vars(errors) if isinstance(vars(errors)[name], type) and not name.startswith("_")}
    assert len(public) > 20
    assert not {name for name in public if f"`{name}`" not in chapter}


def test_every_file_that_the_architecture_names_exists() -> None:
    text = (_ROOT / "docs" / "ARCHITECTURE.md").read_text()
    named = set(re.findall(r"`((?:buffer|jetstream|threads|langgraph|nats|postgres|memory)/[\w/]+\.py)`", text))
    assert len(named) > 40
    assert not {name for name in named if not (_ROOT / "src" / "bufstore" / name).exists()}


def test_every_dotted_name_in_the_documents_can_be_imported() -> None:
    texts = [p.read_text() for p in (_ROOT / "README.md", *(_ROOT / "docs").rglob("*.md"))]
    named = {name for text in texts for name in re.findall(r"`(bufstore(?:\.\w+)+)", text)}
    assert len(named) > 20
    for name in sorted(named):
        assert resolve_name(name)


def test_every_decision_has_a_status_and_a_date() -> None:
    for path in sorted((_ROOT / "docs" / "adr").glob("*.md")):
        lines = path.read_text().splitlines()
        assert re.fullmatch(r"# \d+\. .+", lines[0]), path.name
        status = re.fullmatch(r"Status: (accepted|superseded by (.+)), \d{4}-\d\d-\d\d\.", lines[2])
        assert status, f"{path.name}: line 3 is `Status: accepted, YYYY-MM-DD.` or `Status: superseded by …`"


def test_every_counter_and_timing_of_the_mailbox_is_documented_and_there_before_it_is_counted() -> None:
    text = (_ROOT / "docs" / "MAILBOX.md").read_text()
    table = text.partition("\n## Counters\n")[2].partition("\n## ")[0].partition("\n|---|---|\n")[2]
    named = set(re.findall(r"`([a-z_]+)`", table))
    sources = "\n".join(p.read_text() for p in (_ROOT / "src" / "bufstore" / "mailbox").glob("*.py"))
    counted = set(re.findall(r"ounters\.(?:count|took|timed)\(\"(\w+)\"", sources))
    statistics = Counters().read()
    assert len(counted) > 20
    assert counted <= named == {*statistics.counts, *statistics.timings}
    assert not any(statistics.counts.values())
    assert {(t.count, t.p50_ms, t.p99_ms, t.max_ms) for t in statistics.timings.values()} == {(0, 0.0, 0.0, 0.0)}
