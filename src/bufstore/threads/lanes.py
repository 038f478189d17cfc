"""The buffers in front of a store of threads, as types."""

from __future__ import annotations

from bufstore.buffer.buffer import Buffer
from bufstore.buffer.side_by_side import Lanes
from bufstore.threads.digests import MessageMemory
from bufstore.threads.model import ThreadChange
from bufstore.threads.state import ThreadState

#: The buffer of one lane.
ThreadBuffer = Buffer[ThreadChange, ThreadState, MessageMemory]
#: The buffers of all lanes.
ThreadLanes = Lanes[ThreadChange, ThreadState, MessageMemory]
