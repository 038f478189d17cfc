"""LangGraph's tables in Postgres."""
