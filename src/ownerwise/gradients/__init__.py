"""Per-record gradients of ordinary modules: norms and weighted sums from one backward pass.

    tape = Tape(model)                      # cheap; the model is not wrapped, hooked or changed
    problems = check(model, sample_inputs)  # [] or all Problems (where, what, remedy) at once
    with tape:                              # watches the torch functions that the model calls
        outputs = model(inputs)
    losses = loss(outputs, targets)         # [B], one per record, reduction="none"
    records = tape.backward(losses)         # one pass for activations; no parameter gradients
    records.norms                           # [B], float32 or better
    sums = records.weighted_sum(factors)    # {parameter: sum_i factors[i] * g_i}

How it works. Every torch function that meets a trainable parameter (or something computed from
parameters only) and data is *tapped*: it runs on the parameter without its graph, its input is
kept, and the gradient of its output, as it was before any in-place change, is delivered by the
backward pass. From input and output gradient each *rule* makes a :class:`Contribution`: squared
norms (by Gram matrices or by forming the gradients in cache-sized chunks, whichever is cheaper for
the shapes), and later the weighted sum, without a second backward pass. Uses of one parameter are
added before the norm is taken, with all cross terms.

Rules: linear at any rank and ``x @ w``; convolutions; embedding; layer, group, instance and RMS
norm; RNN, GRU, LSTM and their cells; multi-head attention; entry-by-entry calls and broadcasts of
plain parameters; anything else that is per-record by vmap.

Right or refused. Which dimension holds the records is observed, not guessed (:mod:`layout`); a call
that cannot be shown to be per-record, a parameter used out of the tape's sight, an input changed in
place, batch statistics: all raise :class:`Refused` with a remedy. What no gradient shows, a mixing
of records ahead of the first layer or by a detached statistic, is found by
``check(model, inputs)``.

Formal guarantees. With factors |f_i| <= C_i / norms[i], removing record i changes ``weighted_sum``
by at most C_i in L2 norm, up to rounding (float32 norms were at most 5e-7 below the exact ones on
five models of the benchmark, 24 records each at their first weights; Gram matrices lose digits
where a record's own terms cancel). A record whose gradient is not finite contributes exactly zero.
An empty batch gives zero sums.

A chain of vector layers (a tabular network) needs no watching: :class:`Chain` works it by hand,
with far fewer calls.

Options: ``Tape(model, lean=True)`` spends less memory and more time; ``channels_last=False`` keeps
2-D convolutions in the memory format of the model. Records of one tape may overlap in time
(micro-batches); use one tape per thread.
"""

from ownerwise.gradients.chain import Chain, ChainRecords
from ownerwise.gradients.preflight import check
from ownerwise.gradients.problems import Problem, Refused
from ownerwise.gradients.records import Records
from ownerwise.gradients.rules import install
from ownerwise.gradients.sources import changed_by_data
from ownerwise.gradients.state import State, differing
from ownerwise.gradients.tape import Tape

__all__ = [
    "Chain",
    "ChainRecords",
    "Problem",
    "Records",
    "Refused",
    "State",
    "Tape",
    "changed_by_data",
    "check",
    "differing",
    "install",
]

install()
