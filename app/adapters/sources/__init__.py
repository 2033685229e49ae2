"""The shelf of trace sources: one file a kind of database, found by its name."""
