"""What a private run costs each owner.

`epsilon` is vectorised over owners; `Schedule` says how many steps with how much noise. The two
accountants are `pld` (tight, default) and `rdp`; `chains` evaluates them for many owners at once,
`curves` and `roots` invert them for a million; `reference` checks both with dp-accounting.
"""

from ownerwise.accounting.chains import epsilon
from ownerwise.accounting.costs import ACCOUNTANTS, NOISES, PaidRelease, joint_multiplier
from ownerwise.accounting.schedule import Schedule

__all__ = ["ACCOUNTANTS", "NOISES", "PaidRelease", "Schedule", "epsilon", "joint_multiplier"]
