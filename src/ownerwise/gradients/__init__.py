"""Per-record gradients of ordinary modules: norms and weighted sums from one backward pass.

tape = Tape(model)
with tape:                              # watches the torch functions that the model calls
    outputs = model(inputs)
losses = loss(outputs, targets)         # [B], one per record
records = tape.backward(losses)         # one pass for activations
records.norms                           # [B]
records.weighted_sum(factors)           # {parameter: sum_i factors[i] * g_i}
"""

from ownerwise.gradients.preflight import check
from ownerwise.gradients.problems import Problem, Refused
from ownerwise.gradients.records import Records
from ownerwise.gradients.rules import install
from ownerwise.gradients.tape import Tape

install()

__all__ = ["Problem", "Records", "Refused", "Tape", "check"]
