"""Memory that is lent again: right sizes, no two users of one block, no growth with the steps."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ownerwise.gradients import workspace as workspace_module
from ownerwise.gradients.workspace import Workspace

LIKE = torch.zeros(0)


def held(workspace: Workspace) -> int:
    return sum(block.numel() for blocks in workspace._free.values() for block in blocks)


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=12), returned=st.booleans())
def test_blocks_have_the_asked_shape_and_never_overlap(sizes, returned):
    workspace = Workspace()
    for round_ in range(3):
        blocks = [workspace.lend((size, 3), LIKE) for size in sizes]
        for number, block in enumerate(blocks):
            assert block.shape == (sizes[number], 3)
            block.fill_(100 * round_ + number)
        for number, block in enumerate(blocks):
            assert (block == 100 * round_ + number).all()
        for block in blocks if returned else ():
            workspace.give_back(block)


def test_memory_does_not_grow_with_the_sizes_of_poisson_batches():
    """One block for each request of a step, none for each size that a batch ever had."""
    workspace = Workspace()
    generator = np.random.default_rng(0)
    for batch in generator.binomial(60_000, 512 / 60_000, size=500):
        blocks = [workspace.lend((int(batch), width), LIKE) for width in (100, 100, 7, 1)]
        for block in blocks:
            workspace.give_back(block)
    assert held(workspace) <= 1.5 * 512 * 208


def test_a_growing_request_replaces_its_block():
    workspace = Workspace()
    for size in range(1, 1000):
        workspace.give_back(workspace.lend((size,), LIKE))
    assert held(workspace) <= 3 * 1000


def test_kinds_of_numbers_do_not_share_blocks():
    workspace = Workspace()
    workspace.give_back(workspace.lend((8,), LIKE))
    assert workspace.lend((4,), LIKE.double()).dtype == torch.float64


def test_lean_keeps_nothing():
    workspace = Workspace(lean=True)
    workspace.give_back(workspace.lend((8,), LIKE))
    assert held(workspace) == 0


def test_large_blocks_are_kept_only_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(workspace_module, "_MOST_KEPT", 4 * 100)
    workspace = Workspace()
    for _ in range(3):
        blocks = [workspace.lend((32,), LIKE) for _ in range(5)]
        for block in blocks:
            workspace.give_back(block)
        assert held(workspace) == 2 * 36
        assert workspace._kept == 4 * held(workspace)
