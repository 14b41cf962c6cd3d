"""Binds each stage to store, ledger, launcher and tracker: remembers what was done."""
