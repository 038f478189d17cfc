"""What is public: each package's table of names, what type checkers read, and what is imported agree."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import bufstore
from bufstore import errors

#: Packages whose names are imported when they are asked for.
LAZY = ["bufstore", "bufstore.mailbox", "bufstore.notify", "bufstore.tokens"]

#: Packages that have errors of their own.
WITH_ERRORS = ["bufstore.embedded", "bufstore.mailbox", "bufstore.notify", "bufstore.spark", "bufstore.tokens"]
SOURCES = Path(inspect.getfile(bufstore)).parent


def _checked(package: str) -> dict[str, str]:
    """What type checkers are told: names, and the modules that they come from."""
    tree = ast.parse(Path(inspect.getfile(import_module(package))).read_text())
    (block,) = [n for n in tree.body if isinstance(n, ast.If)]
    imports = [n for n in block.body if isinstance(n, ast.ImportFrom)]
    # Only what is imported under its own name is exported.
    assert all(alias.asname == alias.name for n in imports for alias in n.names)
    return {alias.name: n.module or "" for n in imports for alias in n.names}


@pytest.mark.parametrize("package", LAZY)
def test_type_checkers_are_told_what_is_imported(package: str) -> None:
    module, checked = import_module(package), _checked(package)
    assert sorted(checked) == module.__all__
    for name, home in checked.items():
        assert getattr(module, name) is getattr(import_module(home), name)


@pytest.mark.parametrize("package", LAZY)
def test_a_package_lists_its_names_and_no_others_are_found(package: str) -> None:
    module = import_module(package)
    assert set(module.__all__) <= set(dir(module))
    namespace: dict[str, object] = {}
    builtins.exec(f"from {package} import *", namespace)
    assert set(module.__all__) <= namespace.keys()
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        _ = module.nothing


def test_the_package_itself_imports_no_driver_and_none_of_the_stores() -> None:
    imported = "import sys, bufstore, bufstore.tokens, bufstore.notify, bufstore.mailbox; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", imported], capture_output=True, text=True, check=True
    ).stdout.split()
    ours = {m for m in modules if m.partition(".")[0] == bufstore.__name__}
    assert ours == {*LAZY, "bufstore._lazy"}
    assert not {"nats", "psycopg", "psycopg_pool", "redis", "msgspec"} & set(modules)


def _exported_errors(package: str) -> set[str]:
    module = import_module(package)
    return {name for name in module.__all__ if inspect.isclass(e := getattr(module, name)) and issubclass(e, Exception)}


def test_every_error_is_public_in_one_package() -> None:
    defined = sorted(name for name, e in vars(errors).items() if inspect.isclass(e))
    assert sorted(name for package in ["bufstore", *WITH_ERRORS] for name in _exported_errors(package)) == defined


@pytest.mark.parametrize("package", WITH_ERRORS)
def test_an_error_is_public_in_a_package_of_its_own_when_nothing_else_raises_it(package: str) -> None:
    # No caller of a library sees what the command line raises.
    inside = (SOURCES / "errors.py", SOURCES / "cli", SOURCES / package.removeprefix("bufstore."))
    outside = [p for p in SOURCES.rglob("*.py") if not any(p.is_relative_to(i) for i in inside)]
    raised = {n for p in outside for n in re.findall(r"raise (\w+)", p.read_text())}
    assert not _exported_errors(package) & raised
    # The tree says where to import it from.
    (named,) = re.findall(rf"`{package}`\s\(([^)]+)\)", errors.__doc__ or "")
    assert set(named.replace(",", " ").split()) == _exported_errors(package)
