"""A job's rows become checkpoints, each once: through foreachBatch or ``format("bufstore")``."""
