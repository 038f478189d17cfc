"""The options for reading the log as a source, as strings that Spark hands over. No Spark in here."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bufstore.config import LogConfig, NatsConfig, Secretive
from bufstore.errors import ConfigError
from bufstore.spark.connection_options import connection, named, seconds, words
from bufstore.spark.option_values import count, ids, number, timestamp_us
from bufstore.spark.source.log_columns import ENTRY_COLUMNS, MESSAGE_COLUMNS

#: How long a read of a batch waits for servers that are away, in seconds.
PATIENCE_S = 30.0


@dataclass(frozen=True, kw_only=True, repr=False)
class ReadOptions(Secretive):
    """What a job wants to read. The author of a job sets it; its repr shows no secret."""

    nats: NatsConfig = field(metadata={"secret": True})
    stream: str = LogConfig.stream
    #: "entries": what was written, decoded. "messages": what the server holds, byte for byte.
    form: str = "entries"
    columns: Sequence[str] = tuple(ENTRY_COLUMNS)
    starting_position: str | None = None
    starting_timestamp_us: int | None = None
    ending_position: str | None = None
    ending_timestamp_us: int | None = None
    max_messages: int | None = None
    max_bytes: int | None = None
    #: How many rows a micro-batch waits for (None: it does not wait), and for how many seconds at most.
    min_messages: int | None = None
    max_trigger_delay_s: float = 900.0
    #: The number of tasks that a read is divided into; None: as many as its size asks for, but at least `min_tasks`.
    tasks: int | None = None
    min_tasks: int = os.cpu_count() or 2
    fail_on_data_loss: bool = True
    #: How many seconds a read waits for servers that are away.
    outage_timeout_s: float = PATIENCE_S
    threads: Sequence[str] = ()
    partitions: Sequence[int] = ()


#: Option → what it says. These say what is read.
NAMES = {
    "form": "entries (decoded) or messages (byte for byte)",
    "columns": "the columns you need, comma-separated; others are not decoded",
    "startingPosition": "earliest, latest or a value of column position (default: earliest for a batch, else latest)",
    "startingTimestamp": "ISO 8601; instead of startingPosition",
    "endingPosition": "latest, or the first position that is not read (batch only)",
    "endingTimestamp": "ISO 8601; instead of endingPosition",
    "maxMessagesPerTrigger": "rows of a micro-batch, which ends at a group's end (at least one group)",
    "maxBytesPerTrigger": "bytes of bodies that a micro-batch reads (at least one message of the stream)",
    "minMessagesPerTrigger": "rows that a micro-batch waits for (not with availableNow)",
    "maxTriggerDelay": "how long it waits for them at most, as 90s, 15m (the default) or 1h",
    "numPartitions": "tasks that a read is divided into (default: one for each 64 MiB, but at least minPartitions)",
    "minPartitions": "tasks at least (default: the driver's cores)",
    "failOnDataLoss": "whether messages that are gone unread fail the query (default true)",
    "outageTimeout": "seconds that a read waits for servers that are away (default: 30; of a stream 3600)",
    "threads": "only entries of these, as a JSON list of ids",
    "partitions": "only entries of these partitions of the log, comma-separated",
}
#: The names that Kafka's source has for some options → our names.
_KAFKAS = {"maxoffsetspertrigger": "maxMessagesPerTrigger", "minoffsetspertrigger": "minMessagesPerTrigger"}
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def read_options(given: Mapping[str, str], *, outage_timeout_s: float = PATIENCE_S) -> ReadOptions:
    """Return the options; `outage_timeout_s`: unless they say it. Raises ConfigError, naming the option."""
    found = named({_KAFKAS.get(name.lower(), name): value for name, value in given.items()}, NAMES)
    form = found.get("form", "entries")
    if form not in ("entries", "messages"):
        raise ConfigError("option form must be entries or messages")
    all_columns = ENTRY_COLUMNS if form == "entries" else MESSAGE_COLUMNS
    columns = words(found, "columns") or list(all_columns)
    if unknown := set(columns) - all_columns.keys():
        raise ConfigError(f"option columns: there is no {min(unknown)} in form={form}: {', '.join(all_columns)}")
    for side in ("starting", "ending"):
        if f"{side}Position" in found and f"{side}Timestamp" in found:
            raise ConfigError(f"options {side}Position and {side}Timestamp exclude each other")
    if "threads" in found and "partitions" in found:
        raise ConfigError("options threads and partitions exclude each other")
    for name in ("threads", "partitions"):
        if name in found and form != "entries":
            raise ConfigError(f"option {name} needs form=entries: a message holds entries of many threads")
    if found.get("endingPosition") == "earliest":
        raise ConfigError("option endingPosition must be latest or a position")
    return ReadOptions(
        nats=connection(found),
        stream=LogConfig(stream=found.get("stream", LogConfig.stream)).stream,
        form=form,
        columns=tuple(columns),
        starting_position=_position(found, "startingPosition"),
        starting_timestamp_us=timestamp_us(found, "startingTimestamp"),
        ending_position=_position(found, "endingPosition"),
        ending_timestamp_us=timestamp_us(found, "endingTimestamp"),
        max_messages=count(found, "maxMessagesPerTrigger"),
        max_bytes=count(found, "maxBytesPerTrigger"),
        min_messages=count(found, "minMessagesPerTrigger"),
        max_trigger_delay_s=_delay(found, "maxTriggerDelay", ReadOptions.max_trigger_delay_s),
        tasks=count(found, "numPartitions"),
        min_tasks=count(found, "minPartitions") or ReadOptions.min_tasks,
        fail_on_data_loss=_truth(found, "failOnDataLoss", default=True),
        outage_timeout_s=seconds(found, "outageTimeout", outage_timeout_s),
        threads=ids(found, "threads"),
        partitions=[number("partitions", word) for word in words(found, "partitions")],
    )


def _position(found: Mapping[str, str], name: str) -> str | None:
    value = found.get(name)
    if value is not None and value not in ("earliest", "latest"):
        number(name, value)
    return value


def _delay(found: Mapping[str, str], name: str, default: float) -> float:
    if name not in found:
        return default
    said = re.fullmatch(r"([0-9]+)(ms|s|m|h|d)", found[name].replace(" ", ""))
    if said is None:
        raise ConfigError(f"option {name} must be a time like 90s or 15m")
    return float(said[1]) * _UNITS[said[2]]


def _truth(found: Mapping[str, str], name: str, *, default: bool) -> bool:
    value = found.get(name, str(default)).lower()
    if value not in ("true", "false"):
        raise ConfigError(f"option {name} must be true or false")
    return value == "true"
