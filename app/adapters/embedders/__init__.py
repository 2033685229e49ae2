"""The shelf of embedders: one file a backend, found by its name."""
