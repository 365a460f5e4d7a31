"""INO as a plug of the private step: every method, rule and micro-batch size, after a resume."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import ownerwise as ow
from tools import step_tools as tools
from tools.orders import Shuffled

RECORDS = 90


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(RECORDS, 5, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 3, (RECORDS,), generator=generator)


OWNERS = ow.Owners(np.arange(RECORDS) % 3, {0: 0.5, 1: 2.0, 2: 8.0}, 1e-5)
PLANS = {
    method: ow.plan(OWNERS, method, steps=12, batch_size=30)
    for method in ("sample", "scale", "both")
}


def run(data, plan, steps, folder=None, restore=False, **options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    step = tools.make_step(
        model, functional.cross_entropy, plan=plan, optimizer=optimizer, seed=7, **options
    )
    tools.run_steps(step, data, steps, seed=7, folder=folder, restore=restore)
    return tools.weights_of(model)


def slow_sum(model_outputs_losses, gradients, ino, plan, owner_index, rule, slack):
    """The weighted sum by the definition: rank all, weigh all, clip each, add."""
    losses = np.array(model_outputs_losses)
    clips = plan.clip_norms[owner_index]
    bound = ino.bind(plan)
    weights = bound.weights(losses, clips, owner_index)
    norms = torch.tensor([float(g.norm()) for g in gradients], dtype=torch.float64)
    factors = rule.factors(norms, torch.from_numpy(clips / (1 + slack)), None)
    parts = zip(weights, factors, gradients, strict=True)
    return sum(float(w) * float(f) * g for w, f, g in parts)


@pytest.mark.parametrize("method", PLANS)
@pytest.mark.parametrize("rule", [ow.Standard(), ow.AutoS(), ow.Psac()], ids=repr)
@pytest.mark.parametrize("score", [None, ow.BudgetAware(1.0)], ids=["loss", "budget aware"])
def test_the_step_sums_what_the_definition_says(data, method, rule, score):
    plan = PLANS[method]
    ino = ow.INO(tail=0.6) if score is None else ow.INO(tail=0.6, score_by=score)
    torch.manual_seed(2)
    model = nn.Linear(5, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"weights": ino, "clipping": rule, "stream": ow.SecretStream.from_seed(1)}
    chosen = np.arange(0, RECORDS, 4)
    owner_index = OWNERS.record_owner_index[chosen].astype(np.int64)
    inputs, targets = data[0][chosen], data[1][chosen]
    losses, gradients = [], []
    for record in range(len(chosen)):
        loss = functional.cross_entropy(
            model(inputs[record : record + 1]), targets[record : record + 1]
        )
        found = torch.autograd.grad(loss, list(model.parameters()))
        losses.append(loss.item())
        gradients.append(torch.cat([g.flatten() for g in found]))
    for size in (None, 1, 7):
        step = ow.PrivateStep(
            model,
            plan,
            optimizer,
            functional.cross_entropy,
            performance=ow.Performance(micro_batch_size=size),
            **options,
        )
        total = step.clipped_sum(ow.Batch(0, chosen, owner_index, (inputs, targets)))
        expected = slow_sum(losses, gradients, ino, plan, owner_index, rule, step.slack)
        ours = torch.cat([total[p].flatten() for p in model.parameters()])
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-9)


def test_no_tail_is_idp_sgd(data):
    plan = PLANS["sample"]
    found, expected = run(data, plan, 12, weights=ow.INO(tail=0.0)), run(data, plan, 12)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_a_resumed_run_is_bit_equal(data, tmp_path):
    plan, options = (
        PLANS["both"],
        {"weights": ow.INO(tail=0.5), "performance": ow.Performance(micro_batch_size=8)},
    )
    whole = run(data, plan, 12, **options)
    run(data, plan, 5, folder=tmp_path, **options)
    assert torch.equal(run(data, plan, 12, folder=tmp_path, restore=True, **options), whole)


def at_random():
    """INO as a new process makes it."""
    return ow.INO(tail=0.5, score_by=Shuffled(tools.seeded(7)))


def test_a_resumed_run_draws_the_random_order_of_the_uninterrupted_one(data, tmp_path):
    plan = PLANS["both"]
    whole = run(data, plan, 12, weights=at_random(), performance=ow.Performance(micro_batch_size=8))
    assert not torch.equal(whole, run(data, plan, 12, weights=ow.INO(tail=0.5)))
    first = at_random()
    run(
        data,
        plan,
        5,
        folder=tmp_path,
        weights=first,
        performance=ow.Performance(micro_batch_size=8),
    )
    for weights in (at_random(), first):  # of a new process, or of one that has drawn further
        weights.score(np.zeros(3), np.zeros(3, dtype=int))
        (tmp_path / "checkpoint-00000012.safetensors").unlink(missing_ok=True)
        options = {
            "restore": True,
            "weights": weights,
            "performance": ow.Performance(micro_batch_size=8),
        }
        assert torch.equal(run(data, plan, 12, folder=tmp_path, **options), whole)


def test_only_a_score_that_remembers_is_asked_for_in_a_checkpoint(data, tmp_path):
    plan = PLANS["both"]
    run(data, plan, 5, folder=tmp_path / "by loss", weights=ow.INO(tail=0.5))
    with pytest.raises(ow.OwnerwiseError, match="the state of no plug, but this step has weights"):
        run(data, plan, 12, folder=tmp_path / "by loss", restore=True, weights=at_random())
    run(data, plan, 5, folder=tmp_path / "random", weights=at_random())
    with pytest.raises(ow.OwnerwiseError, match="the state of weights, but this step has none"):
        run(data, plan, 12, folder=tmp_path / "random", restore=True, weights=ow.INO(tail=0.5))


@pytest.mark.parametrize("seeded", [False, True])
def test_a_random_order_that_somebody_knows_is_not_private(seeded):
    """A record more shifts the numbers of those behind it: fine only if nobody knows them."""
    stream = tools.seeded() if seeded else ow.SecretStream()
    model = nn.Linear(5, 3).double()
    step = ow.PrivateStep(
        model,
        PLANS["both"],
        torch.optim.SGD(model.parameters(), lr=0.5),
        functional.cross_entropy,
        weights=ow.INO(tail=0.5, score_by=Shuffled(stream)),
    )
    assert step.private is not seeded
    trainer = ow.Trainer(
        model, PLANS["both"], lr=0.1, weights=step.weights, progress=False, label="random"
    )
    trained = trainer.fit((torch.zeros(RECORDS, 5).double(), torch.zeros(RECORDS).long()))
    assert trained.private is not seeded
    assert trained.not_private == ["the order of the records was drawn with a fixed seed"] * seeded


def crafted(dtype, rows, width=54):
    """A model, and a record whose loss beside others of its kind changes sides with the rows."""
    torch.manual_seed(0)
    model = nn.Linear(width, 2).to(dtype)
    nn.init.zeros_(model.bias)
    across = (model.weight[1] - model.weight[0]).detach().double()
    tried = torch.randn(4000, width, dtype=torch.float64)
    tried -= (tried @ across)[:, None] * across / (across @ across)
    for one in (1e3 * tried).to(dtype):
        gaps = [
            functional.linear(one.expand(n, width).contiguous(), model.weight, model.bias)
            for n in (rows, rows - 1)
        ]
        more, fewer = (gap[:, 1] - gap[:, 0] for gap in gaps)
        if ((more > 0).all() and (fewer < 0).all()) or ((more < 0).all() and (fewer > 0).all()):
            return model, one
    return model, tried[0].to(dtype)


@pytest.mark.parametrize(
    ("dtype", "rows", "records"),
    [(torch.float32, 16, 256), (torch.float32, 16, 15), (torch.float64, 4, 256)],
)
@pytest.mark.parametrize("micro_batch_size", [None, "rows"])
def test_adding_a_record_does_not_reverse_the_order_of_others(
    dtype, rows, records, micro_batch_size
):
    """Opposite records of one loss, up to bits that change with the rows computed at once."""
    with torch.no_grad():
        model, one = crafted(dtype, rows)
    signs = torch.tensor([1.0, -1.0], dtype=dtype).repeat(records)[:records, None]
    inputs = torch.cat([signs * one, torch.zeros(1, len(one), dtype=dtype)])
    targets = torch.ones(records + 1, dtype=torch.int64)
    index = np.arange(records + 1) % 2
    owners = ow.Owners(index, {0: 2.0, 1: 2.0}, 1e-5)
    plan = ow.plan(owners, "uniform", steps=10, batch_size=0.99 * (records + 1))
    size = rows if micro_batch_size == "rows" else None
    step = tools.make_step(
        model,
        functional.cross_entropy,
        plan=plan,
        weights=ow.INO(),
        performance=ow.Performance(micro_batch_size=size),
    )

    def total(count):
        rows_of = (inputs[:count], targets[:count])
        return tools.flat(step.clipped_sum(ow.Batch(0, np.arange(count), index[:count], rows_of)))

    assert float((total(records + 1) - total(records)).norm()) <= 1 + 1e-5


def test_a_batch_of_copies_does_not_prove_that_records_are_separate():
    """Of a single record nothing can be told: the next batch is looked at again."""

    def mixing(outputs, targets, reduction="none"):
        return (outputs - outputs.mean(0)).square().sum(1)

    step = tools.make_step(nn.Linear(5, 3).double(), mixing, plan=PLANS["sample"], weights=ow.INO())
    inputs = torch.randn(4, 5, dtype=torch.float64)
    for count in (1, 4):
        batch = ow.Batch(
            0, np.arange(count), np.arange(count) % 3, (inputs[:count], torch.zeros(count).long())
        )
        if count == 1:
            step.clipped_sum(batch)
        else:
            with pytest.raises(ow.OwnerwiseError, match="changes with the other records"):
                step.clipped_sum(batch)
