"""The background door: workers, sweeper, operators' commands."""
