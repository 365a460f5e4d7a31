"""More records than declared are refused, because the epsilon per owner would be too low."""

import numpy as np
import pytest
import torch

import ownerwise as ow

IDS = np.arange(20).repeat(3)


def step(owners, **options):
    plan = ow.plan(owners, steps=10, batch_size=4.0, **options)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ow.PrivateStep(model, plan, optimizer, torch.nn.functional.cross_entropy)


@pytest.mark.parametrize("unit", ["record", "owner"])
def test_record_sampling_refuses_more_records_than_declared(unit):
    owners = ow.Owners(IDS, 4.0, records=2)
    with pytest.raises(ow.OwnerwiseError, match=r"more records than declared.*owners\.bound"):
        step(owners, unit=unit, sampling="record")
    bounded, kept = owners.bound(2)
    assert len(kept) == 40
    step(bounded, unit=unit, sampling="record")


def test_owner_sampling_does_not_depend_on_the_number_of_records():
    step(ow.Owners(IDS, 4.0, records=2), unit="owner")
