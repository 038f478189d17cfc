"""Foreign text as a terminal may show it."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return the text in one line, with escapes for what a terminal obeys or hides, above all control characters."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
