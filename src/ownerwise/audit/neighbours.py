"""The step on neighbouring batches: how much one canary really changes what leaves the step.

Two steps with the same parameters and spends, the same fixed seed and thus the same noise take the
same batch, once with and once without one of its canaries (with owner sampling, without all of its
rows). What the two updates differ by, times the public divisor, is what that canary contributed.
The plan promises that its length is at most the owner's clip norm. This finds bugs that no score
shows: a divisor that depends on the batch, weights that let one record displace another, and rows
of an owner that are clipped one by one.
"""

from __future__ import annotations

import copy

import numpy as np
import torch

from ownerwise.audit.canaries import Canaries
from ownerwise.audit.checks import Check
from ownerwise.audit.observation import AuditedRun, Training
from ownerwise.randomness import SecretStream

_REMOVALS = 24
_TOLERANCE = 1e-3


def sensitivity(canaries: Canaries, training: Training, seed: int) -> list[Check]:
    """Return, for each group, the largest change that one of its canaries makes in a step.

    The runs are NOT private, which is why only canaries take part. Steps whose sampling rates are
    steered have no neighbours with the same randomness and are left out.

    Args:
        canaries: canaries that come alone.
        training: the plugs of the step.
        seed: the fixed seed.
    """
    plugs = Training(weights=training.weights, clipping=training.clipping)
    first, second = (
        AuditedRun(canaries, copy.deepcopy(plugs), SecretStream.from_seed(seed)) for _ in range(2)
    )
    if first.step.steering is not None or canaries.plan.release_std is not None:
        return []
    largest = dict.fromkeys(range(len(canaries.groups)), 0.0)
    found = dict(largest)
    choices = np.random.default_rng(seed)
    for _, batch in zip(range(_REMOVALS), first.batches(), strict=False):
        owners = batch.all_owners()
        drawn = owners - int(canaries.owner[0])
        shares = np.array([found[int(group)] for group in canaries.group[drawn]])
        smaller = batch
        removed = None
        if len(drawn):  # a canary of a group that was removed least often
            rarest = np.flatnonzero(shares == shares.min())
            removed = int(drawn[choices.choice(rarest)])
            smaller = batch.kept(owners != canaries.owner[removed])
        if first.step.filter is not None and second.step.filter is not None:
            second.step.filter.load(first.step.filter.spent)
        with torch.no_grad():
            second.block.weight.copy_(first.block.weight)
        change = first.take(batch) - second.take(smaller)
        if removed is not None:
            group = int(canaries.group[removed])
            found[group] += 1
            length = float(np.linalg.norm(change)) / float(canaries.clip_norm[removed])
            largest[group] = max(largest[group], length)
    return [
        Check(
            "change due to one canary, as a multiple of the clip norm",
            canaries.groups[group],
            largest[group],
            1.0,
            0.0 if largest[group] > 1 + _TOLERANCE else 1.0,
        )
        for group in largest
        if found[group]
    ]
