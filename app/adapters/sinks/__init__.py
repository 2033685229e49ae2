"""Stores of vectors, one file each."""
