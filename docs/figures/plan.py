"""Plot the sampling rates and clip norms in a plan: `make figures`."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import ownerwise as ow

METHODS = {
    "uniform": ("uniform", "#111827", ":"),
    "sample": ("sample", "#0b6e99", "-"),
    "both": ("both", "#7a4fa3", "--"),
    "scale": ("scale", "#c2571a", "-"),
}


def main() -> None:
    epsilon = np.geomspace(0.2, 8, 40)
    owners = ow.Owners(np.arange(40), epsilon, 1e-6, records=np.full(40, 1000))
    figure, (rates, clips, spent) = plt.subplots(1, 3, figsize=(11.5, 3.7), constrained_layout=True)
    for method, (label, colour, line) in METHODS.items():
        plan = ow.plan(owners, method, steps=2000, batch_size=512)
        label = f"{label} (noise std {plan.noise_std:.2f})"
        style = {"color": colour, "linestyle": line, "linewidth": 2.2, "label": label}
        style["zorder"] = 3 if method == "uniform" else 2
        rates.plot(epsilon, plan.sampling_rates, **style)
        clips.plot(epsilon, plan.clip_norms, **style)
        spent.plot(epsilon, plan.epsilon(), **style)
    rates.set_ylabel("sampling rate per step")
    clips.set_ylabel("clip norm")
    spent.set_ylabel("epsilon spent after 2000 steps")
    ticks = {
        rates: [0.001, 0.002, 0.005, 0.01, 0.02, 0.05],
        clips: [0.2, 0.5, 1, 2],
        spent: [0.2, 0.5, 1, 2, 5, 8],
    }
    for axes, values in ticks.items():
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("the owner's budget, epsilon")
        axes.set_xticks([0.2, 0.5, 1, 2, 5, 8], labels=["0.2", "0.5", "1", "2", "5", "8"])
        axes.set_yticks(values, labels=[f"{value:g}" for value in values])
        axes.minorticks_off()
        axes.grid(color="#e5e7eb", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    rates.legend(frameon=False, fontsize=8.5)
    out = Path(__file__).with_suffix(".png")
    figure.savefig(out, dpi=150, metadata={"Software": None})
    print(f"written {out.name}")


if __name__ == "__main__":
    main()
