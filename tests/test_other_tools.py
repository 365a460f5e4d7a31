"""Lightning and the Trainer of transformers: noise is really added, and nothing else is logged."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ownerwise as ow

pytestmark = pytest.mark.filterwarnings("ignore")  # those of other libraries
LOGGED = {
    *("step", "epoch", "learning_rate", "total_flos", "loss", "grad_norm", "train_loss"),
    *("train_runtime", "train_samples_per_second", "train_steps_per_second"),
}
PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "other-tools.md"


def recipe(heading: str) -> dict:
    """The names that the first block of code below a heading of the page defines."""
    _, _, below = PAGE.read_text().partition(f"## {heading}")
    names = {}
    code = re.search(r"^```python\n(.*?)^```", below, re.DOTALL | re.MULTILINE)
    exec(compile(code[1], heading, "exec"), names)
    return names


def problem(epsilon: float):
    """Two classes that a linear layer tells apart, and a plan with this budget for everybody."""
    torch.manual_seed(0)
    x = torch.randn(2000, 6)
    x[:, 0] *= 10
    y = (x[:, 0] > 0).long()
    owners = ow.Owners(np.zeros(len(x), dtype=int), {0: epsilon}, 1e-5)
    return (x, y), ow.plan(owners, "uniform", steps=25, batch_size=400)


def accuracy(model, data) -> float:
    with torch.no_grad():
        outputs = model(data[0])
    return float((outputs.argmax(1) == data[1]).float().mean())


def with_lightning(model, plan, data, folder):
    lightning = pytest.importorskip("lightning")
    private = recipe("Lightning")["PrivateTraining"](model, plan, data)
    logger = lightning.pytorch.loggers.CSVLogger(folder)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=logger, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(private)
    assert private.private_step.steps_spent == plan.steps
    assert not {**trainer.logged_metrics, **trainer.callback_metrics}
    return private.private_step


def with_transformers(model, plan, data, folder):
    hf = pytest.importorskip("transformers")
    arguments = hf.TrainingArguments(
        folder, max_steps=plan.steps, max_grad_norm=0.0, save_strategy="no", logging_steps=1,
        report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = recipe("Transformers")["PrivateTrainer"](model, plan, data, args=arguments)
    trainer.train()
    for entry in trainer.state.log_history:
        assert entry.keys() <= LOGGED, entry
        values = [entry.get(key, 0.0) for key in ("loss", "grad_norm", "train_loss", "total_flos")]
        assert values == [0.0] * 4, entry
    assert trainer.private_step.steps_spent == plan.steps
    return trainer.private_step


@pytest.mark.parametrize("train", [with_lightning, with_transformers])
def test_huge_noise_destroys_accuracy(train, tmp_path):
    """Pitfall 31: if the tool bypassed the private step, the accuracy would not depend on it.

    With noise of 100 clip norms or more, the direction of the weights is random: accuracies above
    0.9 have a probability below 0.05 for a single run, and below 1e-3 for the lowest of three.
    """
    found = {}
    for epsilon in (100.0, 0.001):
        accuracies = []
        for _ in range(1 if epsilon > 1 else 3):
            data, plan = problem(epsilon)
            model = nn.Linear(6, 2)
            step = train(model, plan, data, tmp_path)
            assert float(step.epsilon()[0]) <= epsilon
            accuracies.append(accuracy(model, data))
        found[epsilon] = min(accuracies)
    assert found[100.0] > 0.95
    assert found[0.001] < 0.9


@pytest.mark.parametrize("train", [with_lightning, with_transformers])
def test_the_noise_is_that_of_the_plan(train, tmp_path):
    """Without any gradient, the parameters move by the noise alone, of the planned size."""
    (x, y), plan = problem(1.0)
    model = nn.Linear(6, 500)
    before = model.weight.detach().clone()
    train(model, plan, (torch.zeros_like(x), y), tmp_path)
    moved = (model.weight - before).detach() / 0.1  # the learning rate
    expected = plan.noise_std_at(0) / plan.expected_batch_size * plan.steps**0.5
    # 3000 numbers: a relative error of 6 standard errors has p < 1e-8
    assert abs(float(moved.std()) / expected - 1) < 6 / (2 * moved.numel()) ** 0.5


def test_the_page_names_what_must_not_be_used():
    text = PAGE.read_text()
    for words in ("PoissonBatches", "huge noise", "logged"):
        assert words in text
