"""Images: handwritten digits held by three sites, and a small convolutional network.

python examples/images.py

PRIVATE: each individual training image, with the epsilon of the site that holds it.
NOT PRIVATE: the test images, the budgets, and how many images each site holds.
"""

import numpy as np
import torch
from torch import nn

import ownerwise as ow

data = ow.data.load("digits")  # comes with scikit-learn; float32 images [1, 8, 8]
print(data)

# Specify the owner of each image: one id per training record, in the same order.
sites = np.resize(["cautious", "middling", "open", "open"], len(data.train))
owners = ow.Owners(sites, {"cautious": 2.0, "middling": 4.0, "open": 8.0}, delta=1e-5)
plan = ow.plan(owners, method="sample", steps=120, batch_size=200)
print(plan.describe(owners=True))

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.GroupNorm(4, 16),  # normalises each image; BatchNorm mixes records and is refused
    nn.Tanh(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(16 * 4 * 4, len(data.classes)),
)
problems = ow.check(model, torch.randn(4, 1, 8, 8))  # random images are sufficient
print(problems or "The model can be trained privately.")

run = ow.Trainer(model, plan, lr=1.0, optimizer_options={"momentum": 0.5}, weights=ow.INO()).fit(
    data.train.tensors(), validation=data.test.tensors()
)

last = run.history[-1]["validation"]
print(f"\naccuracy on test images (no guarantee covers them): {last['accuracy']:.0%}")
print(f"worst digit: {last['worst_group']['name']}, {last['worst_group']['recall']:.0%}")
spent = zip(owners.ids.tolist(), run.epsilon().round(3).tolist(), strict=True)
print(f"epsilon spent per record: {dict(spent)}")
