"""The log as a table or a stream of Spark: ``format("threadlog")``."""
