"""Text, letter by letter: made-up surnames from three registries, with an embedding and an LSTM.

python examples/text.py

PRIVATE: each individual training name and its label, with the epsilon of its registry.
NOT PRIVATE: the held-out names, the budgets, how many names each registry has, and the alphabet,
which is a fixed list. An alphabet or vocabulary counted from private text would be a release.
"""

import numpy as np
import torch

import ownerwise as ow

ALPHABET = "abcdefghijklmnopqrstuvwxyz"  # a letter is 1 + its position; 0 is padding at the end
LENGTH = 12
ENDINGS = {"northern": ("sen", "dottir", "gard"), "southern": ("ini", "ello", "aro")}


def make_names(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return names as numbers [count, LENGTH], and their classes: 0 northern, 1 southern."""
    generator = np.random.default_rng(seed)
    tokens = torch.zeros(count, LENGTH, dtype=torch.long)
    classes = torch.from_numpy(generator.integers(0, len(ENDINGS), count))
    for row, kind in enumerate(classes.tolist()):
        beginning = "".join(generator.choice(list(ALPHABET), generator.integers(2, 6)))
        name = beginning + str(generator.choice(list(ENDINGS.values())[kind]))
        tokens[row, : len(name)] = torch.tensor([1 + ALPHABET.index(c) for c in name])
    return tokens, classes


names, classes = make_names(3000, seed=1)
held_out = make_names(500, seed=2)
registries = np.repeat(["coast", "hills", "town"], [500, 1000, 1500])
owners = ow.Owners(registries, {"coast": 1.0, "hills": 3.0, "town": 8.0}, delta=1e-5)
plan = ow.plan(owners, method="sample", steps=60, batch_size=200)
print(plan.describe(owners=True))

model = ow.models.TextLSTM(1 + len(ALPHABET), len(ENDINGS), embedding=16, hidden=32)
trainer = ow.Trainer(model, plan, lr=0.02, optimizer=torch.optim.Adam, weights=ow.INO())
run = trainer.fit((names, classes), validation=held_out)

before, after = (line["validation"]["accuracy"] for line in (run.history[0], run.history[-1]))
print(f"\naccuracy on held-out names: {before:.0%} before training, {after:.0%} after")
spent = zip(owners.ids.tolist(), run.epsilon().round(3).tolist(), strict=True)
print(f"epsilon spent per record: {dict(spent)}")
print("No guarantee covers the held-out names.")
