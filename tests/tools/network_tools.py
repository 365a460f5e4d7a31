"""Rules that every network must keep; both the library's networks and others are held to them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import ownerwise as ow
from tools import step_tools as tools

TEMPERED = {"scale": 1.5, "temperature": 3.0, "offset": 0.5}


def tokens(count: int) -> Tensor:
    """Texts of seven words, the first of them padded."""
    torch.manual_seed(1)
    made = torch.randint(1, 59, (count, 7))
    made[0, 3:] = 0
    return made


def assert_the_private_step_trains(model: nn.Module, inputs: Tensor, classes: int) -> None:
    """No problems, a sum within the clip norms, and an update of every parameter."""
    assert ow.check(model, inputs) == []
    labels = torch.randint(0, classes, (len(inputs),))
    step = tools.make_step(model, functional.cross_entropy)
    batch = tools.batch_of(inputs, labels)
    clip_norms = step.plan.clip_norms[batch.owner_index]
    expected = tools.loop_over_records(model, functional.cross_entropy, batch, step)
    found = step.clipped_sum(batch)
    assert 0 < float(tools.flat(found).norm()) <= clip_norms.sum()
    for total, wanted in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(total, wanted, rtol=1e-3, atol=1e-4)
    before = [p.detach().clone() for p in model.parameters()]
    step(batch)
    assert all(
        not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)
    )


def assert_sums_are_those_of_the_loop(model: nn.Module, inputs: Tensor, classes: int) -> None:
    """The clipped sum equals that of a loop over records, in float64."""
    model = model.double()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    batch = tools.batch_of(inputs, torch.randint(0, classes, (len(inputs),)))
    step = tools.make_step(model, functional.cross_entropy)
    expected = tools.loop_over_records(model, functional.cross_entropy, batch, step)
    for total, wanted in zip(step.clipped_sum(batch).values(), expected, strict=True):
        torch.testing.assert_close(total, wanted, rtol=0, atol=1e-9)


def assert_padding_has_no_effect(model: nn.Module) -> None:
    """Pitfall 33: a record is not affected by the length of the longest of its batch."""
    model = model.double()
    with torch.no_grad():
        model.embedding.weight[0] = 5.0  # as after noise: the padding row is no longer zero
    texts = torch.tensor([[4, 9, 7, 3], [5, 6, 0, 0]])
    longer = functional.pad(texts, (0, 3))
    together = model(longer)
    torch.testing.assert_close(together, model(texts), rtol=0, atol=1e-12)
    torch.testing.assert_close(together[1:], model(texts[1:, :2]), rtol=0, atol=1e-12)
    gradients = [
        torch.autograd.grad(model(given)[1].square().sum(), list(model.parameters()))
        for given in (longer, texts)
    ]
    for padded, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(padded, plain, rtol=0, atol=1e-12)


def assert_tempered_sigmoids_generalise_tanh(build, images: Tensor) -> None:
    """By default both activations make the same network; other parameters do not."""
    plain, tempered = build(), build(activation="tempered-sigmoid")
    tempered.load_state_dict(plain.state_dict())
    torch.testing.assert_close(tempered(images), plain(images), rtol=0, atol=1e-5)
    other = build(activation=TEMPERED)
    other.load_state_dict(plain.state_dict())
    assert not torch.allclose(other(images), plain(images), atol=1e-3)
    made = build(activation=nn.GELU)
    assert any(isinstance(module, nn.GELU) for module in made.children())
