"""Audits: attacks on our own models, and comparisons of runs with their plans.

An attack that fails proves nothing; a comparison that fails has found a bug. May import everything
up to `training`.
"""

from ownerwise.audit.conformance import Conformance, conformance

__all__ = ["Conformance", "conformance"]
