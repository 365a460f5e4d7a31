"""Results made by hand, whose summaries can be worked out on paper."""

BUDGETS = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 6.0}


def line(step, recalls, losses, overall_loss, seconds=0.0):
    groups = {
        name: {"recall": recall, "loss": loss, "records": 10}
        for name, recall, loss in zip(BUDGETS, recalls, losses, strict=True)
    }
    worst = min(groups, key=lambda name: groups[name]["recall"])
    mean = sum(recalls) / len(recalls)
    return {
        "step": step,
        "seconds": seconds,
        "learning_rate": 0.1,
        "loss": overall_loss,
        "accuracy": mean,
        "balanced_accuracy": mean,
        "worst_group": {"name": worst, "recall": groups[worst]["recall"]},
        "spread": (sum((recall - mean) ** 2 for recall in recalls) / len(recalls)) ** 0.5,
        "groups": groups,
    }


def result(method="idp", seed=0, recalls=(0.2, 0.4, 0.6, 0.8), **changed):
    """A run of 20 steps with three evaluations: group a's loss rises by 0.5, then falls again."""
    history = [
        line(0, (0.0, 0.0, 0.0, 0.0), (2.0, 2.0, 2.0, 2.0), 2.0),
        line(10, (0.0, 0.1, 0.2, 0.4), (2.5, 1.9, 1.8, 1.2), 1.85, 4.0),
        line(20, recalls, (1.9, 1.5, 1.2, 0.9), 1.4, 8.0),
    ]
    final = {k: v for k, v in history[-1].items() if k not in ("step", "seconds", "learning_rate")}
    made = {
        "setting": "digits",
        "title": "made by hand",
        "profile": "paper",
        "changes": [],
        "method": method,
        "spec": method,
        "label": {"idp": "IDP-SGD", "ino": "INO-SGD"}.get(method, method),
        "seed": seed,
        "not_private": [f"science: fixed seed {seed}"],
        "config": {},
        "data": "none",
        "owners": "4 owners",
        "budgets": BUDGETS,
        "evaluated_on": "test",
        "environment": {"threads": 1},
        "plans": [
            {"hash": "0123456789abcdef", "steps": 20, "expected_batch_size": 5.0, "records": 50}
        ],
        "within_budgets": True,
        "history": history,
        "final": final,
        "validation": final,
        "train_seconds": 8.0,
        "wall_seconds": 9.0,
    }
    return made | changed
