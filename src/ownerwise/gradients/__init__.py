"""Per-record gradients of ordinary modules: norms and weighted sums from one backward pass.

This package imports only `errors` and `torch_internals` from the rest of the library.

    tape = Tape(model)                       # cheap; the model is not wrapped, hooked or changed
    problems = check(model, sample_inputs)   # every Problem (where, what, remedy), or []
    with tape:                               # traces the torch functions that the model calls
        outputs = model(inputs)
    losses = loss(outputs, targets)          # [B], one per record, reduction="none"
    gradients = tape.backward(losses)        # one pass for activations; no parameter gradients
    gradients.norms                          # [B], float32 or better
    sums = gradients.weighted_sum(factors)   # {parameter: sum_i factors[i] * g_i}

How it works. The tape *taps* every torch function that combines a trainable parameter (or something
computed from parameters only) with data. The function is called with the detached parameter, its
other input is kept, and the backward pass delivers the gradient with respect to the output as it
was before any in-place change. From the input and the output gradient, a *rule* (`rules`)
builds a `Contribution` (`contributions`). The contribution computes squared norms from
Gram matrices or by forming the gradients in cache-sized chunks, whichever is cheaper for the given
shapes. It later computes the weighted sum without a second backward pass. If a parameter is used
several times, the gradients of its uses are added before the norm is taken, so all cross terms are
included.

Rules exist for linear layers on inputs of any rank and `x @ w`; convolutions; embedding; layer,
group, instance and RMS norm; RNN, GRU, LSTM and their cells; multi-head attention; pointwise calls
and broadcasts of plain parameters; and, through vmap, any other call that treats records
separately.

Refusals. The tape observes which dimension the records lie along instead of guessing it
(`layout`). It confirms this in every batch with more records than any before, or in which data may
move records (`relocation`). A call that cannot be shown to treat records separately, a parameter
used where the tape does not see it, an input changed in place, and batch statistics all raise
`Refused` with a remedy. Some problems, such as mixing records before the first layer or through a
detached statistic, are not visible in any gradient; `check(model, inputs)` finds those.

Formal guarantees. With factors |f_i| <= C_i / norms[i], removing record i changes `weighted_sum`
by at most C_i in L2 norm, up to rounding. (On five benchmark models at their initial weights, with
24 records each, float32 norms were at most 5e-7 below the exact ones. Where a record's own terms
cancel, norms are rounded up.) A record whose gradient is not finite contributes exactly zero.
An empty batch gives zero sums.

Regions under `torch.utils.checkpoint` are computed again in the backward pass, with the same calls;
code compiled by `torch.compile` runs as ordinary Python (`recomputation`).

A chain of vector layers (a tabular network) does not need the tape: `Chain` runs it layer
by layer with far fewer calls.

With `tape.backward(losses, segments)`, several rows form one element, such as all rows of an owner:
norms and factors are then those of the segments' mean gradients.

`Tape(model, lean=True)` is slower but uses less memory. The gradients of several micro-batches
from one tape may exist at the same time. Use one tape per thread.
"""

from ownerwise.gradients.calls import call_model
from ownerwise.gradients.chain import Chain, ChainGradients
from ownerwise.gradients.contributions import BLOCK
from ownerwise.gradients.per_record_gradients import PerRecordGradients
from ownerwise.gradients.precision import autocasts, full_products
from ownerwise.gradients.preflight import check
from ownerwise.gradients.problems import Problem, Refused
from ownerwise.gradients.recomputation import uncompiled
from ownerwise.gradients.segments import Segments
from ownerwise.gradients.state import Attributes, State, differing, evaluation_mode, run_on_dummies
from ownerwise.gradients.tape import Tape
from ownerwise.gradients.tracked_parameters import changed_by_data

__all__ = [
    "BLOCK",
    "Attributes",
    "Chain",
    "ChainGradients",
    "PerRecordGradients",
    "Problem",
    "Refused",
    "Segments",
    "State",
    "Tape",
    "autocasts",
    "call_model",
    "changed_by_data",
    "check",
    "differing",
    "evaluation_mode",
    "full_products",
    "run_on_dummies",
    "uncompiled",
]
