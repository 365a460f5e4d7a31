"""The papers' experiments: settings, methods, a runner that can be stopped, and tables.

Runs have fixed seeds, so that they can be repeated. They are science on public data and NOT
PRIVATE; every result says so.
"""
