"""How each method changes a setting's configuration, depending on its argument."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from ownerwise.errors import OwnerwiseError

Sections = dict[str, dict[str, Any]]
_COUNT_NOISE = 0.1  # fraction of the expected batch; the count then costs next to nothing


def without_weights(sections: Sections, argument: str) -> Sections:
    """Weight all records in a batch equally."""
    return sections | {"weights": {}}


def calibrated(method: Callable[[Sections, str], Sections]) -> Callable[[Sections, str], Sections]:
    """Use a method, and pay for a calibration of the trained model."""

    def sections(sections: Sections, argument: str) -> Sections:
        changed = method(sections, argument)
        return changed | {"plan": changed["plan"] | {"calibration": True}}

    return sections


def ino(sections: Sections, argument: str) -> Sections:
    """Use INO-SGD with records ordered by decreasing loss; the argument is the tail."""
    weights = {"kind": "ino", **sections["weights"]}
    weights.pop("kappa", None)
    if argument:
        weights.pop("tail_length", None)
        weights["tail"] = float(argument)
    return sections | {"weights": weights}


def ino_shape(sections: Sections, argument: str) -> Sections:
    """Use INO-SGD with another tail shape, given as "alpha/beta" or "steps"."""
    weights = {key: value for key, value in ino(sections, "")["weights"].items() if key != "shape"}
    if argument == "steps":
        weights = {k: v for k, v in weights.items() if k not in ("alpha", "beta")}
        weights["shape"] = "steps"
    else:
        weights["alpha"], weights["beta"] = map(float, argument.split("/"))
    return sections | {"weights": weights}


def ino_order(sections: Sections, argument: str) -> Sections:
    """Use INO-SGD with records ordered by something other than the loss."""
    return sections | {"weights": ino(sections, "")["weights"] | {"order": argument}}


def ino_budget(sections: Sections, argument: str) -> Sections:
    """Make the order depend on budgets as well; the argument is "kappa" or "kappa/tail"."""
    weights = {"kind": "ino", "kappa": 1.0, **sections["weights"]}
    kappa, _, tail = argument.partition("/")
    if kappa:
        weights["kappa"] = float(kappa)
    if tail:
        weights.pop("tail_length", None)
        weights["tail"] = float(tail)
    return sections | {"weights": weights}


def uniform(sections: Sections, argument: str) -> Sections:
    """Use DP-SGD, with the strictest budget for all owners."""
    plan = {key: value for key, value in sections["plan"].items() if key != "mixture"}
    return sections | {"plan": plan | {"method": "uniform"}, "weights": {}}


def dpis(sections: Sections, argument: str) -> Sections:
    """Accept records by gradient norm; the argument, if any, is the target acceptance rate."""
    changed = uniform(sections, "")
    clipping: dict[str, Any] = {"kind": "importance"}
    if argument:
        clipping["acceptance"] = float(argument)
        changed["plan"]["release_std"] = _COUNT_NOISE * changed["plan"]["batch_size"]
    return changed | {"training": changed["training"] | {"clipping": clipping}}


def smaller_batch(sections: Sections, argument: str) -> Sections:
    """Use DP-SGD with a fraction of the expected batch size."""
    changed = uniform(sections, "")
    changed["plan"]["batch_size"] *= float(argument)
    return changed


def tempered_sigmoid(sections: Sections, argument: str) -> Sections:
    """Use DP-SGD with tempered sigmoids as activations."""
    changed = uniform(sections, "")
    return changed | {"model": changed["model"] | {"activation": "tempered-sigmoid"}}


def falling_noise(sections: Sections, argument: str) -> Sections:
    """Use DP-SGD with noise that decreases on a schedule."""
    changed = uniform(sections, "")
    return changed | {"plan": changed["plan"] | {"noise_schedule": argument}}


def class_budget(sections: Sections, argument: str) -> Sections:
    """Use IDP-SGD with a changed budget for one class or all classes, such as "0=3" or "all=3"."""
    owners = deepcopy(sections["owners"])
    assignment = owners.get("assignment", {})
    given = assignment.get("budgets")
    if assignment.get("kind") != "by_class" or not isinstance(given, list):
        raise OwnerwiseError(
            "method class-budget needs a setting in which every class is an owner with a budget "
            'from a list: owners.assignment = {kind = "by_class", budgets = [...]}'
        )
    which, _, epsilon = argument.partition("=")
    changed = range(len(given)) if which == "all" else [int(which)]
    if any(number >= len(given) for number in changed):
        raise OwnerwiseError(f"class-budget:{argument}: expected a class number below {len(given)}")
    assignment["budgets"] = [
        float(epsilon) if number in changed else value for number, value in enumerate(given)
    ]
    return sections | {"owners": owners, "weights": {}}
