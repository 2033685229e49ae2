"""The shelves: one file per foreign system, found by name."""
