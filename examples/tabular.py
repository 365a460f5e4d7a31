"""Your own table: visits to four clinics, each with its own privacy budget.

python examples/tabular.py

PRIVATE: the contents of each individual visit used for training, with its clinic's epsilon.
NOT PRIVATE: the test visits (one in five) that the model is evaluated on, the budgets, and how many
visits each clinic has.
"""

from pathlib import Path

import ownerwise as ow

# Ranges and lists come from public knowledge; deriving them from the table would cost privacy.
data = ow.data.load_table(
    Path(__file__).with_name("visits.csv"),
    target="outcome",
    owner="clinic",
    features={
        "age": (0, 110),
        "pulse": (30, 200),
        "pressure": (60, 240),
        "ward": ["day", "night", "emergency"],
    },
    classes=["home", "admitted"],
)
print(data)

budgets = {"orchard": 1.0, "harbour": 2.0, "lakeside": 4.0, "northfield": 8.0}  # epsilon
owners = ow.Owners(data.train.columns["owner"], budgets, delta=1e-5)
plan = ow.plan(owners, method="sample", steps=150, batch_size=200, clip_norm=1.0)
print(plan.describe(owners=True))

model = ow.models.mlp(len(data.features), len(data.classes), hidden=(16,), activation="tanh")
notes = {"data": data.name, "not_private": list(data.not_private)}  # not_private is empty here
run = ow.Trainer(model, plan, lr=1.0, weights=ow.INO(), notes=notes).fit(
    data.train.tensors(),
    validation=data.test.tensors(),
    validation_groups=data.test.columns["owner"],
)

print("\nclinic       budget   spent  recall before  recall after (test visits: no guarantee)")
before, after = (line["validation"]["groups"] for line in (run.history[0], run.history[-1]))
for clinic, spent in zip(owners.ids.tolist(), run.epsilon(), strict=True):
    recalls = f"{before[clinic]['recall']:12.0%} {after[clinic]['recall']:13.0%}"
    print(f"{clinic:12} {budgets[clinic]:6g} {spent:7.3f} {recalls}")

run.report("visits-report.html")
run.card("visits-card.md")
print("\nWritten: visits-report.html, visits-card.md")
