"""Holdfast: batch jobs on RQ that cannot be lost. Empty on purpose: importing it loads nothing."""
