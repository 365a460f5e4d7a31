"""Individualized PATE: a student learns from noised votes of teachers on public questions.

This package may import everything up to `training`; nothing imports it but the public names.
"""
