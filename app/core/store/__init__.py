"""Postgres: one module a table family; functions that take an open transaction."""
