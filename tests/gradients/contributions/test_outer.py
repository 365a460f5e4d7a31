"""Norms of layers on sequences: how the records are divided into chunks."""

import pytest
import torch

from ownerwise.gradients.contributions import Outer
from ownerwise.gradients.memory_budget import MemoryBudget


class Recorded(Outer):
    """Notes the sizes of the chunks in which gradients are formed."""

    def _form(self, start, stop, into=None):
        self.chunks.append(stop - start)
        return super()._form(start, stop, into)


@pytest.mark.parametrize(
    ("threads", "chunks"), [(1, [5, 4]), (2, [4, 4, 1]), (3, [3, 3, 3]), (5, [5, 4]), (8, [5, 4])]
)
@pytest.mark.parametrize("lean", [False, True])
def test_threads_share_each_chunk_evenly(monkeypatch, threads, chunks, lean):
    """With 5 records for 2 threads, one of them would wait for a third round."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    left, right = (torch.randn(9, 30, width, dtype=torch.float64) for width in (6, 4))
    use = Recorded(left, right, MemoryBudget(lean=lean, chunk_bytes=5 * 4 * 6 * 4))
    use.chunks = []
    squares = use.squared_norms()
    assert use.chunks == chunks
    torch.testing.assert_close(squares, (left.mT @ right).square().sum(dim=(1, 2)))
