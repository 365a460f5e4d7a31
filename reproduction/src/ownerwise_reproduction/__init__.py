"""The papers' experiments: data sets, settings, methods, a resumable runner, and tables.

Runs have fixed seeds and can be repeated. They use public data for research and are NOT PRIVATE, as
every result states.
"""
