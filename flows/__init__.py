"""Decides what comes next: the round, and the commands that start it."""
