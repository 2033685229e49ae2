"""Numbered SQL, forward only, and the runner that applies it."""
