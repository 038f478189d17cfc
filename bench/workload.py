"""What is written: texts of a given size, and conversations, real ones or generated ones of the same shape."""

from __future__ import annotations

import gzip
import json
import os
import random
from pathlib import Path
from typing import Any

_FILE = "agent-conversations.jsonl.gz"
_WORDS = ("order", "refund", "flight", "please", "the", "confirm", "passenger", "your", "policy", "change", "I", "a")
_SEED = 20260921
_SYLLABLES = ("ba", "con", "de", "er", "fi", "gra", "ho", "in", "ka", "lo", "men", "no", "or", "pre", "qui", "re", "sta", "ti")
#: So many different texts are enough that no compression finds the last one again.
_TEXTS = 256


def texts(size: int) -> list[str]:
    """Different texts of `size` letters, the same in every process. As prose does, they compress a little: a row of
    equal letters would cost a database that compresses what it stores next to nothing.
    """
    rng = random.Random(size)
    words = ["".join(rng.choices(_SYLLABLES, k=rng.randint(1, 4))) for _ in range(4000)]
    return [" ".join(rng.choices(words, k=size // 3))[:size] for _ in range(_TEXTS)]


def conversations() -> tuple[str, list[list[Any]]]:
    """Where they come from ("real" or "generated"), and 200 lists of messages.

    Real ones are those of `agent-conversations.jsonl.gz` in the folder that BUFSTORE_DATA names. Generated ones have
    their number, lengths (6 to 62 messages) and sizes (median about 213 bytes, a few of some kB).
    """
    folder = os.environ.get("BUFSTORE_DATA")
    if folder and (Path(folder) / _FILE).exists():
        with gzip.open(Path(folder) / _FILE, "rt", encoding="utf-8") as lines:
            return "real", [json.loads(line)["messages"] for line in lines]
    rng = random.Random(_SEED)
    return "generated", [_conversation(rng) for _ in range(200)]


def _conversation(rng: random.Random) -> list[Any]:
    length = min(max(round(rng.lognormvariate(3.15, 0.5)), 6), 62)
    return [_message(rng, number) for number in range(length)]


def _message(rng: random.Random, number: int) -> dict[str, Any]:
    size = min(round(rng.lognormvariate(5.0, 1.1)), 9000)
    words: list[str] = []
    while size > 0:
        words.append(rng.choice(_WORDS))
        size -= len(words[-1]) + 1
    role = "system" if number == 0 else ("user", "assistant", "tool")[number % 3]
    return {"role": role, "content": " ".join(words)}
