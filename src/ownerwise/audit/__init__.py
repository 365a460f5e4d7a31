"""Audits: attacks on our own models, and comparisons of runs with their plans.

An attack that fails proves nothing; a comparison that fails has found a bug. May import all
subpackages up to `training`.
"""

from ownerwise.audit.canaries import Canaries
from ownerwise.audit.canary_attack import ATTACKS, FAILURE, one_run
from ownerwise.audit.checks import Check
from ownerwise.audit.heads import Heads
from ownerwise.audit.inference import INFERENCES
from ownerwise.audit.plan_comparison import FALSE_ALARMS, Conformance, conformance
from ownerwise.audit.rates import Measured
from ownerwise.audit.results import FILE, Audit, GroupAudit, load_audits
from ownerwise.audit.shadow_attack import membership
from ownerwise.audit.signals import Signals
from ownerwise.audit.trade_off import TradeOff

__all__ = [
    "ATTACKS",
    "FAILURE",
    "FALSE_ALARMS",
    "FILE",
    "INFERENCES",
    "Audit",
    "Canaries",
    "Check",
    "Conformance",
    "GroupAudit",
    "Heads",
    "Measured",
    "Signals",
    "TradeOff",
    "conformance",
    "load_audits",
    "membership",
    "one_run",
]
