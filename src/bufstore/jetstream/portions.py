"""Cuts a long list of subjects into requests that a server takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

#: A server looks up 1024 subjects for a direct get.
SUBJECTS_MAX = 1000
#: What a subject takes in a request besides its characters: quotation marks, a comma and a space.
_BESIDE = 4


def portions(subjects: Sequence[str], bytes_max: int) -> Iterator[Sequence[str]]:
    """Yield the subjects in order, as many at a time as one request holds, in at most so many bytes if it can.

    Subjects have ASCII characters only. One that is too long for a request is alone in its own, which the server
    refuses.
    """
    begin = size = 0
    for i, subject in enumerate(subjects):
        taken = len(subject) + _BESIDE
        if i > begin and (i - begin == SUBJECTS_MAX or size + taken > bytes_max):
            yield subjects[begin:i]
            begin, size = i, 0
        size += taken
    if begin < len(subjects):
        yield subjects[begin:]
