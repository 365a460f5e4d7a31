"""A private training loop of one's own: three owners, three budgets, fifteen lines.

python examples/own_loop.py
"""

import numpy as np
import torch

import ownerwise as ow

torch.manual_seed(0)
inputs = torch.randn(4000, 20)
labels = (inputs @ torch.randn(20) > 0).long()
record_owner = np.repeat(["clinic", "cohort", "volunteers"], [500, 1500, 2000])

owners = ow.Owners(record_owner, {"clinic": 0.5, "cohort": 2.0, "volunteers": 8.0}, delta=1e-5)
plan = ow.plan(owners, method="sample", steps=200, batch_size=128, clip_norm=1.0)
print(plan.describe())

model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
step = ow.PrivateStep(
    model, plan, optimizer, torch.nn.functional.cross_entropy, weights=ow.INO(tail=0.4)
)
for batch in ow.PoissonBatches((inputs, labels), plan):
    step(batch)

fresh = torch.randn(2000, 20)  # validation data of one's own would stand here
print(f"\nspent: {dict(zip(owners.ids.tolist(), step.epsilon().round(3).tolist(), strict=True))}")
print(f"share of class 1 on fresh inputs: {model(fresh).argmax(1).float().mean():.2f}")
