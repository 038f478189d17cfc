"""Jobs on a NATS with a CA of one's own, which asks for a certificate."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bufstore import NatsConfig, TlsFiles
from bufstore.embedded import Servers
from bufstore.spark import SinkConfig, archive, bulk_drain, checkpoint_sink
from bufstore.spark.connection_options import connection_options
from conftest import Deployment
from helpers import fresh
from integration.test_cli_environments import Certificates
from integration.test_setup import NatsByHand
from spark.jobs import frame, in_postgres, prepared, rows_of, settings_of


async def test_jobs_reach_a_nats_that_asks_for_a_certificate(spark: Any, servers: Servers, tmp_path: Path) -> None:
    """Regression: an SSLContext was the only way, and it cannot be sent to executors."""
    made = Certificates(tmp_path)
    server = NatsByHand(
        tmp_path / "nats",
        f'tls {{ cert_file: "{made.cert}", key_file: "{made.key}", ca_file: "{made.ca}", verify: true, timeout: 10 }}',
    )
    async with server:
        files = TlsFiles(ca=made.ca, certificate=made.client_cert, key=made.client_key)
        nats, threads = NatsConfig(servers=server.url, tls=files), [fresh() for _ in range(4)]
        elsewhere: Any = SimpleNamespace(nats=SimpleNamespace(url=nats), postgres=servers.postgres)
        deployment = Deployment(elsewhere)
        await prepared(deployment)
        config = SinkConfig(app_id="query", **settings_of(deployment))
        await asyncio.to_thread(checkpoint_sink(config), frame(spark, rows_of(threads, range(2))), 0)
        options = {
            **connection_options(nats),
            "postgresUrl": servers.postgres.dsn,
            "schema": deployment.name,
            "stream": deployment.log.stream,
        }
        assert options["tlsCertificateFile"] == str(made.client_cert)

        def on_spark() -> tuple[int, int]:
            of_log = {n: v for n, v in options.items() if n not in ("postgresUrl", "schema")}
            log = spark.read.format("threadlog").options(**of_log, columns="position").load().count()
            rows = frame(spark, rows_of(threads, range(2, 3)))
            rows.write.format("bufstore").options(**options, bucket=deployment.log.bucket).mode("append").save()
            table = spark.read.format("bufstore").options(**options, table="messages", columns="thread_id").load()
            return log, table.count()

        assert await asyncio.to_thread(on_spark) == (8, 12)
        assert (await asyncio.to_thread(archive, spark, config, str(tmp_path / "archive"))).count
        assert (await asyncio.to_thread(bulk_drain, spark, config, tasks=1)).entries == 12
        assert await in_postgres(deployment, threads) == {t: [0, 1, 2] for t in threads}
