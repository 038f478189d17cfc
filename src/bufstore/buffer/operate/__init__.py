"""An operator's tools: quarantine, self-check, repair, erasure, and how full the log is."""
