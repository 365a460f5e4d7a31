"""What a private run costs each owner.

`epsilon` is vectorised over owners; `Schedule` says how many steps with how much noise. The two
accountants, `pld` (tight, default) and `rdp`, are modules with one function each; the modules
`curves` and `roots` invert them for a million owners at once; `reference` checks both with
dp-accounting.
"""

from ownerwise.accounting.chains import epsilon
from ownerwise.accounting.costs import ACCOUNTANTS, NOISES, PaidRelease, joint_multiplier
from ownerwise.accounting.schedule import Schedule

__all__ = ["ACCOUNTANTS", "NOISES", "PaidRelease", "Schedule", "epsilon", "joint_multiplier"]
