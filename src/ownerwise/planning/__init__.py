"""Planning, which turns a request and the owners' budgets into a frozen, verified `Plan`.

This package may import owners and accounting. If a plan accounts for the release of a mechanism
from another package, the mechanism states its cost through a protocol defined here.
"""

from ownerwise.planning.adaptive_clip_norm import AdaptiveClipNorm
from ownerwise.planning.advice import Advice, advise
from ownerwise.planning.batch_bounds import largest_total
from ownerwise.planning.budget_classes import BudgetClass
from ownerwise.planning.making import make_plan, plan
from ownerwise.planning.plans import Plan
from ownerwise.planning.request import NO_CONSTRAINTS, RECORDS_PER_OWNER, PlanRequest
from ownerwise.planning.solver import METHODS
from ownerwise.planning.table import epsilon_words, owner_statement
from ownerwise.planning.units import hardened_or
from ownerwise.planning.verification import Verification

__all__ = [
    "METHODS",
    "NO_CONSTRAINTS",
    "RECORDS_PER_OWNER",
    "AdaptiveClipNorm",
    "Advice",
    "BudgetClass",
    "Plan",
    "PlanRequest",
    "Verification",
    "advise",
    "epsilon_words",
    "hardened_or",
    "largest_total",
    "make_plan",
    "owner_statement",
    "plan",
]
