"""Rows of nested data, and what is used of torch's private `torch.utils._pytree`."""

from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch
from torch.utils import _pytree as pytree

from ownerwise.batches import row_counts, take
from ownerwise.batches.trees import without_rows
from ownerwise.errors import OwnerwiseError

Pair = namedtuple("Pair", "left right")

WHEN_TORCH_CHANGES = (
    "torch.utils._pytree changed: adapt ownerwise/batches/trees.py, the only module that uses it "
    "there, or write its three functions as plain recursion over tuples, lists and dicts"
)


class MyDict(dict):
    """A container that torch does not know."""


def example():
    rows = torch.arange(6).reshape(3, 2)
    return {"a": (rows, [rows + 1]), "b": Pair(rows, OrderedDict(c=rows))}


def test_torch_keeps_the_functions_and_the_container_types_in_use():
    data = {"a": (1, [2, None]), "b": Pair(3, OrderedDict(c=4)), "d": defaultdict(list, e=5)}
    assert pytree.tree_leaves(data) == [1, 2, None, 3, 4, 5], WHEN_TORCH_CHANGES
    mapped = pytree.tree_map(str, data)
    assert mapped == {
        "a": ("1", ["2", "None"]),
        "b": Pair("3", OrderedDict(c="4")),
        "d": {"e": "5"},
    }, WHEN_TORCH_CHANGES
    assert type(mapped["b"]) is Pair, WHEN_TORCH_CHANGES
    assert pytree.tree_leaves(MyDict(a=1)) == [MyDict(a=1)], WHEN_TORCH_CHANGES


def test_take_returns_the_rows_of_every_tensor_in_the_same_containers():
    taken = take(example(), [2, 0])
    rows = torch.tensor([[4, 5], [0, 1]])
    assert isinstance(taken["b"], Pair)
    assert isinstance(taken["b"].right, OrderedDict)
    for found, expected in (
        (taken["a"][0], rows),
        (taken["a"][1][0], rows + 1),
        (taken["b"].left, rows),
        (taken["b"].right["c"], rows),
    ):
        assert torch.equal(found, expected)
    assert torch.equal(take(torch.arange(5), slice(1, 3)), torch.tensor([1, 2]))


def test_row_counts_collects_the_rows_of_every_tensor():
    assert row_counts(example()) == {3}
    mixed = (torch.zeros(2), {"a": torch.zeros(4, 1), "b": torch.tensor(1.0)})
    assert row_counts(mixed) == {0, 2, 4}


def test_without_rows_keeps_dtypes_shapes_and_values_that_are_no_tensors():
    empty = without_rows({"x": torch.ones(3, 2, dtype=torch.int16), "name": "text"})
    assert empty["x"].shape == (0, 2)
    assert empty["x"].dtype == torch.int16
    assert empty["name"] == "text"


@pytest.mark.parametrize("value", [None, "text", 3, MyDict(a=torch.zeros(3))])
def test_values_that_are_no_tensors_are_refused(value):
    data = (torch.zeros(3), [value])
    refusal = f"a batch contains a {type(value).__name__}; expected tensors"
    for call in (lambda: take(data, [0]), lambda: row_counts(data)):
        with pytest.raises(OwnerwiseError, match=refusal):
            call()


def test_an_unknown_container_is_refused_where_its_rows_would_stay():
    with pytest.raises(OwnerwiseError, match="a batch contains a MyDict"):
        without_rows({"a": MyDict(x=torch.zeros(1))})
