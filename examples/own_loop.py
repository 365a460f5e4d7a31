"""Your own private training loop: three owners, three budgets, fifteen lines.

python examples/own_loop.py

PRIVATE: each individual training record, with its owner's epsilon.
NOT PRIVATE: the validation records, the budgets, and how many records each owner has.
"""

import numpy as np
import torch

import ownerwise as ow

torch.manual_seed(0)  # for the made-up data and the initial weights; noise never depends on it
inputs = torch.randn(5000, 20)
labels = (inputs @ torch.randn(20) > 0).long()
training, validation = (inputs[:4000], labels[:4000]), (inputs[4000:], labels[4000:])
record_owner = np.repeat(["clinic", "cohort", "volunteers"], [500, 1500, 2000])

owners = ow.Owners(record_owner, {"clinic": 0.5, "cohort": 2.0, "volunteers": 8.0}, delta=1e-5)
plan = ow.plan(owners, method="sample", steps=200, batch_size=128, clip_norm=1.0)
print(plan.describe(owners=True))

model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
step = ow.PrivateStep(
    model, plan, optimizer, torch.nn.functional.cross_entropy, weights=ow.INO(tail=0.4)
)
for batch in ow.PoissonBatches(training, plan):
    step(batch)

spent = dict(zip(owners.ids.tolist(), step.epsilon().round(3).tolist(), strict=True))
accuracy = (model(validation[0]).argmax(1) == validation[1]).float().mean()
print(f"\n{step!r}")
print(f"epsilon spent per record: {spent}")
print(f"accuracy on validation records (no guarantee covers them): {accuracy:.0%}")
