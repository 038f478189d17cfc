"""`bufstore demo`: many writers, an outage of Postgres, a verified report."""
