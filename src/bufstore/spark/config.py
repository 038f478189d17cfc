"""Where a job's checkpoints go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from bufstore.config import LogConfig, Secretive
from bufstore.errors import ConfigError
from bufstore.postgres.migrate import check_schema
from bufstore.types import check_id


@dataclass(frozen=True, kw_only=True, repr=False)
class SinkConfig(Secretive):
    """Set by the data engineer who writes the job. Goes to the executors as it is; its repr shows no secret."""

    #: Names the source in every thread that it writes to. One streaming query, for as long as its checkpoint folder lives.
    app_id: str
    nats: Sequence[str] = field(default=("nats://127.0.0.1:4222",), metadata={"url": True})
    postgres: str = field(default="", metadata={"secret": True})
    schema: str = "bufstore"
    log: LogConfig = field(default_factory=LogConfig)
    #: What a row that cannot become a checkpoint does: "fail" ends the batch (all others are stored), "skip" counts it.
    bad_rows: Literal["fail", "skip"] = "fail"
    #: Tasks that write at the same time; None: Spark's shuffle partitions.
    tasks: int | None = None
    #: Checkpoints on their way per task.
    in_flight: int = 256
    append_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        check_id(self.app_id, "app_id")
        check_schema(self.schema)
        if isinstance(self.nats, str):
            object.__setattr__(self, "nats", (self.nats,))
        if not self.postgres:
            raise ConfigError("SinkConfig.postgres is needed: threads that the log does not know are looked up there")
        if self.bad_rows not in ("fail", "skip"):
            raise ConfigError("SinkConfig.bad_rows is 'fail' or 'skip'")
        if self.in_flight < 1 or (self.tasks is not None and self.tasks < 1):
            raise ConfigError("SinkConfig.in_flight and tasks must be positive")
