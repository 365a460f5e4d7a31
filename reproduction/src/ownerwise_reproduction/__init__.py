"""The papers' experiments: data sets, settings, methods, a resumable runner, and tables.

Runs have fixed seeds and can be repeated. They are research on public data and NOT PRIVATE; every
result says so.
"""
