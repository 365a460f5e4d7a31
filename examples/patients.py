"""Patients with many visits: one promise per patient, whatever the number of visits.

python examples/patients.py

PRIVATE: each patient with all of their visits, with the patient's epsilon.
NOT PRIVATE: the test patients, the budgets, and the list of patients.
"""

import numpy as np
import torch

import ownerwise as ow

random = np.random.default_rng(0)  # for the made-up visits; noise never depends on it
patients = 900
visits = random.integers(1, 25, patients)
patient = np.repeat(np.arange(patients), visits)
condition = random.normal(size=(patients, 6))
inputs = (condition[patient] + random.normal(size=(len(patient), 6))).astype(np.float32)
labels = (condition[patient, :2].sum(axis=1) > 0).astype(np.int64)
X, y = torch.from_numpy(inputs), torch.from_numpy(labels)

test = patient >= 700  # whole patients are held out, so no patient is on both sides
epsilon = {number: (2.0, 4.0, 8.0)[number % 3] for number in range(700)}
owners = ow.Owners(patient[~test], epsilon, delta=1e-5)

plan = ow.plan(owners, unit="owner", steps=150, batch_size=100, records_per_owner=8)
print(plan.describe())

model = torch.nn.Linear(6, 2)
run = ow.Trainer(model, plan, lr=1.0, progress=False).fit(
    (X[~test], y[~test]), validation=(X[test], y[test])
)
accuracy = run.history[-1]["validation"]["accuracy"]
print(f"\nepsilon spent per patient: up to {run.epsilon().max():.3f}")
print(f"accuracy on the visits of test patients (no guarantee covers them): {accuracy:.0%}")
