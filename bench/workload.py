"""The texts that are written: of a given size, or conversations, real ones or generated ones of the same shape."""

from __future__ import annotations

import gzip
import json
import os
import random
from pathlib import Path
from typing import Any

_FILE = "agent-conversations.jsonl.gz"
_SEED = 20260921
_SYLLABLES = ("ba", "con", "der", "fi", "gra", "ho", "in", "ka", "lo", "men", "no", "or", "pre", "re", "sta", "ti")
#: So many different texts that no compression finds a repeated one.
_TEXTS = 256


def texts(size: int) -> list[str]:
    """Return different texts of `size` letters, the same in every process.

    They compress a little, as prose does; a database that compresses would store almost nothing of equal letters.
    """
    rng = random.Random(size)
    words = _vocabulary(rng)
    return [_text(rng, words, size) for _ in range(_TEXTS)]


def conversations() -> tuple[str, list[list[Any]]]:
    """Return the source of the conversations ("real" or "generated"), and 200 lists of messages.

    Real ones are those of `agent-conversations.jsonl.gz` in the folder that BUFSTORE_DATA names. Generated ones have
    the same number, lengths (6 to 62 messages) and sizes (median about 213 bytes, a few of some kB).
    """
    folder = os.environ.get("BUFSTORE_DATA")
    if folder and (Path(folder) / _FILE).exists():
        with gzip.open(Path(folder) / _FILE, "rt", encoding="utf-8") as lines:
            return "real", [json.loads(line)["messages"] for line in lines]
    rng = random.Random(_SEED)
    words = _vocabulary(rng)
    return "generated", [_conversation(rng, words) for _ in range(200)]


def _conversation(rng: random.Random, words: list[str]) -> list[Any]:
    found: list[Any] = []
    for number in range(min(max(round(rng.lognormvariate(3.15, 0.5)), 6), 62)):
        role = "system" if number == 0 else ("user", "assistant", "tool")[number % 3]
        size = min(round(rng.lognormvariate(5.0, 1.1)), 9000)
        found.append({"role": role, "content": _text(rng, words, size)})
    return found


def _vocabulary(rng: random.Random) -> list[str]:
    return ["".join(rng.choices(_SYLLABLES, k=rng.randint(1, 4))) for _ in range(4000)]


def _text(rng: random.Random, words: list[str], size: int) -> str:
    return " ".join(rng.choices(words, k=size // 3 + 1))[:size]
