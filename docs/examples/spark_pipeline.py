"""From a stream of rows to threads, and to an answered question about them: which agent answers slowest?

pip install 'bufstore[embedded,spark]'
python docs/examples/spark_pipeline.py

It starts the servers that it needs, and they end with it.
"""

import json
import tempfile
from pathlib import Path

from bufstore import (
    BlockingBufferedStore,
    BufferConfig,
    BufferedThreadStore,
    Consistency,
    LogConfig,
    PostgresThreadStore,
)
from bufstore.embedded import Servers
from bufstore.spark import Deployment, SinkConfig, archive, checkpoint_sink, hold_position, session, tabulate
from bufstore.spark.analytics import entries, messages

#: In Unix seconds, UTC.
MONDAY = 1767571200
#: For each day: who works on which ticket, and how many seconds an answer takes. Cyd is slow on the second day.
DAYS = [
    [("lost-bag", "ada", 20), ("late-train", "bob", 45), ("wrong-bill", "cyd", 30)],
    [("lost-bag", "ada", 10), ("late-train", "bob", 45), ("wrong-bill", "cyd", 90)],
]
#: The time from each question to its answer.
QUESTION = """
    SELECT agent_id, count(*) AS answers, avg(at - asked_at) AS seconds
    FROM (SELECT *, lag(at) OVER (PARTITION BY thread_id ORDER BY number) AS asked_at
          FROM (SELECT *, CAST(get_json_object(json, '$.at') AS BIGINT) AS at FROM messages WHERE effect = 'applied'))
    WHERE role = 'assistant'
    GROUP BY agent_id
    ORDER BY seconds DESC
"""

#: Who has written how much, and in how many tickets.
WORK = """
    SELECT agent_id, count(*) AS messages, count(DISTINCT thread_id) AS tickets
    FROM current_messages JOIN current_threads USING (thread_id)
    GROUP BY agent_id
    ORDER BY agent_id
"""


def produce(topic: Path, day: int) -> None:
    """Write a day's rows as Kafka gives them: a key, a value, and an offset that orders them."""
    rows = []
    for hour in range(8, 12):
        for ticket, agent, seconds in DAYS[day]:
            asked = MONDAY + day * 86400 + hour * 3600
            question = {"role": "user", "content": "Is there any news?", "at": asked}
            answer = {"role": "assistant", "content": "Not yet.", "at": asked + seconds}
            rows += [(ticket, {"agent": agent} | message) for message in (question, answer)]
    lines = [
        json.dumps({"key": key, "value": json.dumps(value), "offset": offset})
        for offset, (key, value) in enumerate(rows, day * len(rows))
    ]
    (topic / f"day-{day}.json").write_text("\n".join(lines))


with tempfile.TemporaryDirectory() as folder, Servers() as servers:
    topic, archived = Path(folder) / "topic", f"{folder}/archive"
    topic.mkdir()
    nats, postgres = servers.nats.url, servers.postgres.dsn
    deployment = Deployment(nats=nats, postgres=postgres)
    spark = session("pipeline")
    spark.sparkContext.setLogLevel("ERROR")  # it warns, with a stack trace, of folders that are not there yet

    # With Kafka it is spark.readStream.format("kafka") …, and key and value are cast to strings.
    stream = spark.readStream.schema("key string, value string, offset bigint").json(str(topic))
    checkpoints = stream.selectExpr(
        "key AS thread_id",
        "concat('run-', key) AS run_id",
        "get_json_object(value, '$.agent') AS agent_id",
        "array(value) AS delta",
        "offset AS position",
    )
    sink = checkpoint_sink(SinkConfig(app_id="pipeline", nats=nats, postgres=postgres))
    query = checkpoints.writeStream.foreachBatch(sink).option("checkpointLocation", f"{folder}/checkpoints")
    query = query.trigger(availableNow=True)

    # The app's store makes the log and flushes it into Postgres. Nothing leaves the log before it is archived.
    config = BufferConfig(log=LogConfig(archive=True))
    inner = PostgresThreadStore(postgres)
    with BlockingBufferedStore(lambda: BufferedThreadStore.open(inner, nats=nats, config=config)) as store:
        # The first day goes into the log, and from there into the archive and its table.
        produce(topic, 0)
        query.start().awaitTermination()
        archive(spark, deployment, archived)
        rows = tabulate(spark, archived).rows

        # The query goes on where it stopped. The second day is in the log and not in the archive.
        produce(topic, 1)
        query.start().awaitTermination()

        # Threads and messages as they are now, flushed or not; both tables are of one position.
        with hold_position(deployment) as held:
            for table in ("threads", "messages"):
                now = spark.read.format("bufstore").options(**held.options | {"table": table}).load()
                now.createOrReplaceTempView(f"current_{table}")
            for row in spark.sql(WORK).collect():
                print(f"{row.agent_id}: {row.messages} messages in {row.tickets} ticket")

        # A strong read flushes first, and then asks Postgres.
        threads = store.query_threads(consistency=Consistency.STRONG).threads
        print(f"{len(threads)} threads with {sum(t.version for t in threads)} messages in Postgres")

        # The table, with what the log holds behind it.
        both = entries(spark, archived, deployment).cache()
        print(f"{rows} entries in the table, {both.count() - rows} behind it in the log")
        messages(both).createOrReplaceTempView("messages")
        answer = spark.sql(QUESTION).collect()
        for row in answer:
            print(f"{row.agent_id}: {row.answers} answers, {row.seconds:.0f} s each")
        print(f"{answer[0].agent_id} answers slowest")
    spark.stop()
