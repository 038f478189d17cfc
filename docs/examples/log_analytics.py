"""What happens in a log, as tables and as pictures: run it cell by cell in a notebook, or as

python docs/examples/log_analytics.py nats://127.0.0.1:4222 pictures/
"""

# %% Where the log is. With a cluster: its session instead.
import sys
from pathlib import Path

import matplotlib.pyplot as plt
from pyspark.sql import functions as F

from bufstore.spark import session
from bufstore.spark.analytics import COLUMNS, activity, by_thread, coalescing, hot_threads

nats, folder = sys.argv[1], Path(sys.argv[2])
stream = sys.argv[3] if len(sys.argv) > 3 else "THREADLOG"
folder.mkdir(parents=True, exist_ok=True)
spark = session("log analytics")

# %% Read once, decoded only as far as needed, and keep it: every question below is another pass.
options = {"natsUrl": nats, "stream": stream, "columns": COLUMNS}
entries = spark.read.format("threadlog").options(**options).load().cache()
print(f"{entries.count()} entries")

# %% Who does how much, per hour?
hours = activity(entries)
hours.show(truncate=False)
table = hours.toPandas()
figure, axes = plt.subplots(1, 2, figsize=(10, 4))
for agent, of_agent in table.fillna({"agent_id": "(none)"}).groupby("agent_id"):
    axes[0].plot(of_agent["hour"], of_agent["checkpoints"], marker="o", label=agent)
    axes[1].plot(of_agent["hour"], of_agent["tokens"], marker="o", label=agent)
axes[0].set_title("checkpoints per hour")
axes[1].set_title("estimated tokens per hour")
axes[0].legend()
figure.autofmt_xdate()
figure.savefig(folder / "activity.png")

# %% Which threads are hot, and how are checkpoints spread over threads?
hot = hot_threads(entries, 15).toPandas()
spread = by_thread(entries).groupBy("checkpoints").agg(F.count("*").alias("threads")).orderBy("checkpoints").toPandas()
figure, axes = plt.subplots(1, 2, figsize=(10, 4))
axes[0].barh([str(t)[:24] for t in hot["thread_id"]], hot["checkpoints"])
axes[0].invert_yaxis()
axes[0].set_title("hottest threads, checkpoints")
axes[1].bar(spread["checkpoints"], spread["threads"])
axes[1].set_title("threads by number of checkpoints")
figure.tight_layout()
figure.savefig(folder / "threads.png")

# %% What would another flush window spare Postgres?
windows = [0.1, 0.5, 2.0, 5.0]
folded = [coalescing(entries, w).agg(F.sum("entries") / F.sum("changes")).first()[0] for w in windows]
figure, axis = plt.subplots(figsize=(5, 4))
axis.plot(windows, folded, marker="o")
axis.set_xlabel("window, s")
axis.set_title("entries per change of a thread")
figure.savefig(folder / "coalescing.png")

# %%
spark.stop()
