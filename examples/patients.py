"""Patients with many recordings: one promise per patient, whatever the number of recordings.

python examples/patients.py

With OWNERWISE_DATA set to a folder that contains parkinsons/parkinsons_updrs.data (UCI data set
189, Parkinsons telemonitoring: 5,875 voice recordings of 42 people), it uses these real people.
Otherwise, it makes up 600 patients, and says so.

PRIVATE: each patient in training with all of their recordings, with the patient's epsilon.
NOT PRIVATE: the held-out patients, the budgets, and the list of patients.
"""

import os
from pathlib import Path

import numpy as np

from ownerwise.estimators import PrivateClassifier

MEASURES = slice(6, 22)  # jitter, shimmer, noise and other measures of a voice
LARGEST = [0.02, 2e-4, 0.01, 0.01, 0.03, 0.1, 1, 0.05, 0.05, 0.1, 0.15, 0.2, 40, 1, 1, 0.5]
IMPAIRED = 20  # points of the motor score; from public knowledge, not from these recordings


def recordings():
    """Return the inputs, the labels and the patient of each recording, and where they are from."""
    path = Path(os.environ.get("OWNERWISE_DATA", ".")) / "parkinsons" / "parkinsons_updrs.data"
    if path.exists():
        table = np.loadtxt(path, delimiter=",", skiprows=1)
        inputs = np.column_stack([table[:, 1] / 100, table[:, MEASURES] / LARGEST])
        return inputs, table[:, 4] > IMPAIRED, table[:, 0].astype(int), "real recordings (UCI 189)"
    random = np.random.default_rng(0)  # for the made-up patients; noise never depends on it
    patient = np.repeat(np.arange(600), random.integers(1, 25, 600))
    condition = random.uniform(size=(600, 17))
    inputs = condition[patient] + random.normal(scale=0.1, size=(len(patient), 17))
    labels = condition[patient, :2].sum(axis=1) > 1
    return inputs, labels, patient, "made-up recordings, because OWNERWISE_DATA is not set"


X, y, patient, source = recordings()
people = np.unique(patient)
print(f"Data: {source}, of {len(people)} patients")

classifier = PrivateClassifier(
    epsilon={number: (4.0, 8.0, 16.0)[number % 3] for number in people.tolist()},
    delta=1e-5,
    unit="owner",  # each epsilon holds for a patient with all of their recordings
    records_per_owner=8,
    validation_fraction=0.25,  # holds out whole patients, because the unit is the owner
    steps=100,
    batch_size=len(people) / 3,  # expected number of patients per step
    hidden=(),
    lr=1.0,
    weights=None,
    classes=[False, True],
    input_range=(0, 1),
)
classifier.fit(X, y, owners=patient)
run = classifier.run_
print(run.plan.describe())

found = run.history[-1]["validation"]
print(f"\nepsilon spent per patient: up to {classifier.epsilon_.max():.3f}")
print(
    f"Held out: {found['owners']} patients, whom no guarantee covers. Accuracy per patient "
    f"{found['owner_accuracy']:.0%}, per recording {found['accuracy']:.0%}"
)
