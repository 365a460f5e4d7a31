"""Plot the sampling rates and clip norms in a plan: `make figures`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import ownerwise as ow
from ownerwise_reproduction.drawing import colour, finish, new_figure, save

METHODS = {
    "uniform": ("DP-SGD at the strictest budget", 6, ":"),
    "sample": ("sampling rates", 1, "-"),
    "both": ("both", 3, "--"),
    "scale": ("clip norms", 0, "-"),
}
MESSAGE = "Individual budgets need a sixth of the noise or less, and each is used in full"


def main() -> None:
    epsilon = np.geomspace(0.2, 8, 40)
    owners = ow.Owners(np.arange(40), epsilon, 1e-6, records=np.full(40, 1000))
    figure, (rates, clips, spent) = new_figure(3, MESSAGE, size=(3.9, 3.7))
    noise = {}
    for method, (label, number, line) in METHODS.items():
        plan = ow.plan(owners, method, steps=2000, batch_size=512)
        noise[method] = plan.noise_std
        label = f"{label} (noise std {plan.noise_std:.2f})"
        style = {"color": colour(number), "linestyle": line, "label": label}
        style["zorder"] = 4 if line != "-" else 3
        rates.plot(epsilon, plan.sampling_rates, **style)
        clips.plot(epsilon, plan.clip_norms, **style)
        spent.plot(epsilon, plan.epsilon(), **style)
    spent.text(0.75, 1.6, "the three plans with\nindividual budgets", fontsize=8, ha="right")
    spent.text(1.2, 0.22, "DP-SGD", fontsize=8)
    assert 5.5 < noise["uniform"] / noise["both"] < 6.5 < noise["uniform"] / noise["sample"]
    ticks = {
        rates: [0.001, 0.002, 0.005, 0.01, 0.02, 0.05],
        clips: [0.2, 0.5, 1, 2],
        spent: [0.2, 0.5, 1, 2, 5, 8],
    }
    names = ("sampling rate per step", "clip norm", "ε spent after 2,000 steps")
    for (axes, values), name in zip(ticks.items(), names, strict=True):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks([0.2, 0.5, 1, 2, 5, 8], labels=["0.2", "0.5", "1", "2", "5", "8"])
        axes.set_yticks(values, labels=[f"{value:g}" for value in values])
        axes.minorticks_off()
        finish(figure, [axes], "ε that the owner set", name, legend=False)
    handles, labels = rates.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    save(figure, Path(__file__).with_suffix(".png"))
    print("written plan.png")


if __name__ == "__main__":
    main()
