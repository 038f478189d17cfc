"""Public names: each package's table of names, the names that type checkers see, and what is imported agree."""

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

#: Packages whose names are imported on first use.
LAZY = ["bufstore", "bufstore.langgraph", "bufstore.mailbox", "bufstore.notify", "bufstore.spark", "bufstore.tokens"]

#: Packages with errors of their own.
WITH_ERRORS = [
    "bufstore.embedded",
    "bufstore.langgraph",
    "bufstore.mailbox",
    "bufstore.notify",
    "bufstore.spark",
    "bufstore.tokens",
]
SOURCES = Path(inspect.getfile(bufstore)).parent
ROOT = Path(__file__).parent.parent.parent
#: The public packages, according to docs/COMPATIBILITY.md.
PUBLIC = re.findall(r"^\* `(bufstore[\w.]*)`:", (ROOT / "docs" / "COMPATIBILITY.md").read_text(), re.MULTILINE)


def _checked(package: str) -> dict[str, str]:
    """The names that type checkers see, and the modules that they come from."""
    tree = ast.parse(Path(inspect.getfile(import_module(package))).read_text())
    (block,) = [n for n in tree.body if isinstance(n, ast.If)]
    imports = [n for n in block.body if isinstance(n, ast.ImportFrom)]
    # A name is exported only if it is imported under its own name.
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
    imported = f"import sys, {', '.join(LAZY)}; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", imported], capture_output=True, text=True, check=True
    ).stdout.split()
    ours = {m for m in modules if m.partition(".")[0] == bufstore.__name__}
    assert ours == {*LAZY, "bufstore._lazy", "bufstore.at_exit"}
    assert not {"nats", "psycopg", "psycopg_pool", "redis", "msgspec", "langgraph"} & set(modules)


def _exported_errors(package: str) -> set[str]:
    module = import_module(package)
    return {name for name in module.__all__ if inspect.isclass(e := getattr(module, name)) and issubclass(e, Exception)}


def test_every_error_is_public_in_one_package() -> None:
    defined = sorted(name for name, e in vars(errors).items() if inspect.isclass(e))
    assert sorted(name for package in ["bufstore", *WITH_ERRORS] for name in _exported_errors(package)) == defined


@pytest.mark.parametrize("package", WITH_ERRORS)
def test_an_error_is_public_in_a_package_of_its_own_when_nothing_else_raises_it(package: str) -> None:
    # A library's caller does not see the errors of the command line.
    inside = (SOURCES / "errors.py", SOURCES / "cli", SOURCES / package.removeprefix("bufstore."))
    outside = [p for p in SOURCES.rglob("*.py") if not any(p.is_relative_to(i) for i in inside)]
    raised = {n for p in outside for n in re.findall(r"raise (\w+)", p.read_text())}
    assert not _exported_errors(package) & raised
    # The tree of errors says where to import them from.
    (named,) = re.findall(rf"`{package}`\s\(([^)]+)\)", errors.__doc__ or "")
    assert set(named.replace(",", " ").split()) == _exported_errors(package)


def test_the_page_on_compatibility_names_every_package_that_is_public() -> None:
    listing = {"bufstore"} | {
        ".".join(("bufstore", *p.parent.relative_to(SOURCES).parts))
        for p in SOURCES.rglob("__init__.py")
        if "__all__" in p.read_text()
    }
    assert listing <= set(PUBLIC)
    for name in PUBLIC:
        module = import_module(name)
        assert module.__all__, name
        assert all(hasattr(module, n) and not n.startswith("_") for n in module.__all__), name


def _examples() -> list[tuple[str, str]]:
    """The Python code in documents, examples and docstrings, with its document's name."""
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "bench").glob("*.md")]
    blocks = [(p.name, b) for p in documents for b in re.findall(r"```python\n(.*?)```", p.read_text(), re.DOTALL)]
    files = [(p.name, p.read_text()) for p in (ROOT / "docs" / "examples").rglob("*.py")]
    docstrings = [(name, import_module(name).__doc__ or "") for name in PUBLIC]
    return blocks + files + docstrings


def test_examples_import_public_names_only() -> None:
    imports = [
        (document, module, name.strip())
        for document, text in _examples()
        for module, one_line, lines in re.findall(r"^ *from (bufstore[\w.]*) import (?:(\w.*)|\(([^)]*)\))", text, re.M)
        for name in (one_line or lines).partition("#")[0].split(",")
        if name.strip()
    ]
    assert len(imports) > 20
    assert not [i for i in imports if i[1] not in PUBLIC or i[2] not in import_module(i[1]).__all__]


def test_the_code_in_documents_is_python() -> None:
    for document, text in _examples():
        if document not in PUBLIC:  # the rest of a docstring is prose
            compile(text, document, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def _promised(classes: list[type]) -> set[str]:
    """The methods that protocols document for all implementations."""
    protocols = [c for c in classes if getattr(c, "_is_protocol", False)]
    return {name for p in protocols for name, method in vars(p).items() if inspect.getdoc(method)}


@pytest.mark.parametrize("package", PUBLIC)
def test_everything_public_has_a_docstring(package: str) -> None:
    module = import_module(package)
    public = {name: getattr(module, name) for name in module.__all__}
    # A class's methods may be documented by a protocol that is not public.
    ours = [m for name, m in list(sys.modules.items()) if m is not None and name.startswith("bufstore.")]
    promised = _promised([c for m in ours for c in vars(m).values() if inspect.isclass(c)])
    missing: list[str] = []
    for name, value in public.items():
        if inspect.isfunction(value) and not value.__doc__:
            missing.append(name)
        if not inspect.isclass(value):
            continue
        if not value.__doc__ or value.__doc__.startswith(f"{name}("):  # a dataclass generates this one
            missing.append(name)
        for part, member in inspect.getmembers(value):
            function = member.fget if isinstance(member, property) else member
            is_ours = getattr(function, "__module__", None) and function.__module__.startswith("bufstore")
            if part.startswith("_") or not (inspect.isroutine(function) and is_ours):
                continue
            if not inspect.getdoc(member) and part not in promised:
                missing.append(f"{name}.{part}")
    assert not missing
