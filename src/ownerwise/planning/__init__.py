"""Planning: from a request and the owners' budgets to one frozen, verified `Plan`.

May import owners and accounting. Whatever a later room needs the plan to pay for states its cost
here through a small protocol.
"""

from ownerwise.planning.budget_classes import BudgetClass
from ownerwise.planning.plans import Plan, Verification
from ownerwise.planning.request import NO_CONSTRAINTS, plan, request_problems
from ownerwise.planning.solver import METHODS

__all__ = [
    "METHODS",
    "NO_CONSTRAINTS",
    "BudgetClass",
    "Plan",
    "Verification",
    "plan",
    "request_problems",
]
