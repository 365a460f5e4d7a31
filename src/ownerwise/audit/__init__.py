"""Audits.

May import x.
"""
