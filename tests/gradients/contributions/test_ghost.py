"""Norms of a matrix that is used several times: from inner products where they are cheaper."""

import pytest
import torch

from ownerwise.gradients.contributions import Lookup, Outer, shared_ghost_norms
from ownerwise.gradients.memory_budget import MemoryBudget

COUNT, WORDS, WIDTH = 3, 400, 8


def tied(terms):
    """An embedding that is also the output layer, as in GPT-2."""
    torch.manual_seed(terms)
    ids = torch.randint(0, 9, (COUNT, terms))  # some words occur several times
    looked_up = torch.randn(COUNT, terms, WIDTH, dtype=torch.float64)
    scores = torch.randn(COUNT, terms, WORDS, dtype=torch.float64)
    states = torch.randn(COUNT, terms, WIDTH, dtype=torch.float64)
    budget = MemoryBudget()
    return [Lookup(ids, looked_up, WORDS), Outer(scores, states, budget)], budget


@pytest.mark.parametrize("terms", [1, 5, 20])
def test_norms_and_bounds_are_those_of_the_formed_gradients(terms):
    uses, budget = tied(terms)
    found = shared_ghost_norms(uses, budget)
    assert found is not None
    squares, bounds = found
    formed = sum((use.per_record(0, COUNT) for use in uses), start=torch.zeros(()))
    torch.testing.assert_close(squares, formed.square().sum(dim=(1, 2)))
    lookup, outer = uses
    lengths = lookup.gradient.norm(dim=2) + outer.left.norm(dim=2) * outer.right.norm(dim=2)
    torch.testing.assert_close(bounds, lengths.sum(dim=1))


def test_long_records_are_formed():
    """The cost of inner products grows with the square of the length."""
    uses, budget = tied(200)
    assert shared_ghost_norms(uses, budget) is None


def test_inner_products_show_the_bound_on_a_single_use():
    left = torch.randn(COUNT, 3, 300, dtype=torch.float64)
    right = torch.randn(COUNT, 3, 200, dtype=torch.float64)
    use = Outer(left, right, MemoryBudget(lean=True))
    before = use.terms_bound()  # Cauchy-Schwarz
    squares, after = use.squared_norms(), use.terms_bound()
    assert use.held is None
    assert before is not None
    assert after is not None
    torch.testing.assert_close(after, (left.norm(dim=2) * right.norm(dim=2)).sum(dim=1))
    assert (squares.sqrt() <= after).all()
    assert (after <= before).all()


def test_bounds_of_several_chunks_are_those_of_one():
    """A record that cancels may be in any chunk."""
    left = torch.randn(6, 3, 300, dtype=torch.float64) * torch.arange(1.0, 7)[:, None, None]
    right = torch.randn(6, 3, 200, dtype=torch.float64)
    ids = torch.zeros(6, 3, dtype=torch.int64)

    def found(budget):
        use = Outer(left, right, budget)
        squares = use.squared_norms()
        tied = [Lookup(ids, right, 300), Outer(left, right, budget)]
        together = shared_ghost_norms(tied, budget)
        assert together is not None
        return squares, use.terms_bound(), *together

    small = MemoryBudget(lean=True, chunk_bytes=1)
    assert Outer(left, right, small).records_at_once("ghost") == 4
    for one, other in zip(found(small), found(MemoryBudget(lean=True)), strict=True):
        torch.testing.assert_close(one, other)
