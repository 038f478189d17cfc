"""What is known of groups that stand in the log."""

from __future__ import annotations

from typing import NamedTuple

from bufstore.buffer.groups.group import Group
from bufstore.jetstream.messages import StoredMessage


class Written(NamedTuple):
    """A group that is stored, and the message that it is."""

    group: Group
    message: StoredMessage


class Behind(NamedTuple):
    """What stands behind a group: a message of the log."""

    seq: int
    #: The group's id; 0 for what is not a group.
    id: int
    #: The sequence of the group before it.
    before: int
