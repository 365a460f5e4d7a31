"""The methods that are compared: what each makes of a setting's configuration and population.

`parse("idp,undersample:0.3")` reads what the command line was given. A method with several levels
and no argument stands for all of them: `undersample` is `undersample:0.1` to `undersample:0.5`.

Accounting of `sequential` (groups of owners one after another, each by DP-SGD at the lowest budget
within it): a record takes part in the phase of its own group alone. Before that phase nothing
depends on it; after it, the later phases take the model, which is an output, and other records, so
they are post-processing for this record. Hence it spends what its own phase spends, and every phase
is planned for the full budget of its group. That needs groups which are public and made from
budgets, never from contents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np

from ownerwise.config_keys import ORDERS
from ownerwise.errors import OwnerwiseError
from ownerwise.experiments.population import Population
from ownerwise.noise_schedules import SCHEDULES

Sections = dict[str, dict[str, Any]]
_COUNT_NOISE = 0.1  # of the expected batch: the count of accepted records costs next to nothing
MOST_TIERS = 10
"""Groups that `sequential` makes of the budgets, at most."""


@dataclass(frozen=True, eq=False)
class Phase:
    """One training within a run: most methods have one."""

    population: Population
    plan: Mapping[str, Any]


@dataclass(frozen=True)
class Method:
    """A method with its argument, such as undersample with 0.3.

    Attributes:
        name: as on the command line.
        argument: what follows the colon, or "".
        label: as tables and legends show it.
        notes: what must be said wherever its results are shown; empty if it keeps all budgets.
        private: False for plain SGD.
    """

    name: str
    argument: str
    label: str
    notes: tuple[str, ...]
    private: bool

    @property
    def spec(self) -> str:
        """Name and argument, as `parse` reads them."""
        return f"{self.name}:{self.argument}" if self.argument else self.name

    @property
    def slug(self) -> str:
        """Name and argument, as files are named."""
        return self.spec.replace(":", "-").replace("/", "-")

    def sections(self, sections: Mapping[str, Mapping[str, Any]]) -> Sections:
        """Return the sections of the configuration as this method trains with them."""
        return KINDS[self.name].sections({k: dict(v) for k, v in sections.items()}, self.argument)

    def phases(self, population: Population, plan: Mapping[str, Any], seed: int) -> Sequence[Phase]:
        """Return the trainings that a run consists of, with their plans' options."""
        return KINDS[self.name].phases(population, plan, self.argument, seed)


@dataclass(frozen=True)
class _Kind:
    """A method before it has its argument."""

    label: str
    sections: Callable[[Sections, str], Sections]
    phases: Callable[[Population, Mapping[str, Any], str, int], Sequence[Phase]]
    with_argument: str = ""
    levels: tuple[str, ...] = ("",)
    check: Callable[[str], bool] = lambda argument: argument == ""
    expected: str = "no argument"
    notes: tuple[str, ...] = ()
    private: bool = True


def parse(text: str) -> list[Method]:
    """Return the methods in a list with commas, or say what is wrong with each."""
    problems: list[str] = []
    found: dict[str, Method] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, argument = item.partition(":")
        kind = KINDS.get(name)
        if kind is None:
            problems.append(f"method {name!r}: expected one of {', '.join(KINDS)}")
            continue
        for level in (argument,) if argument else kind.levels:
            if not kind.check(level):
                problems.append(f"method {item!r}: expected {name} with {kind.expected}")
                break
            label = (kind.with_argument or kind.label).format(level) if level else kind.label
            made = Method(name, level, label, kind.notes, kind.private)
            found[made.slug] = made
    if not found and not problems:
        problems.append(f"no method was given; expected some of {', '.join(KINDS)}")
    if problems:
        raise OwnerwiseError(problems)
    return list(found.values())


def _without_weights(sections: Sections, argument: str) -> Sections:
    return sections | {"weights": {}}


def _ino(sections: Sections, argument: str) -> Sections:
    weights = {"kind": "ino", **sections["weights"]}
    weights.pop("kappa", None)
    if argument:
        weights.pop("tail_length", None)
        weights["tail"] = float(argument)
    return sections | {"weights": weights}


def _ino_shape(sections: Sections, argument: str) -> Sections:
    weights = {key: value for key, value in _ino(sections, "")["weights"].items() if key != "shape"}
    if argument == "steps":
        weights = {k: v for k, v in weights.items() if k not in ("alpha", "beta")}
        weights["shape"] = "steps"
    else:
        weights["alpha"], weights["beta"] = map(float, argument.split("/"))
    return sections | {"weights": weights}


def _ino_order(sections: Sections, argument: str) -> Sections:
    return sections | {"weights": _ino(sections, "")["weights"] | {"order": argument}}


def _ino_budget(sections: Sections, argument: str) -> Sections:
    weights = {"kind": "ino", "kappa": 1.0, **sections["weights"]}
    kappa, _, tail = argument.partition("/")
    if kappa:
        weights["kappa"] = float(kappa)
    if tail:
        weights.pop("tail_length", None)
        weights["tail"] = float(tail)
    return sections | {"weights": weights}


def _uniform(sections: Sections, argument: str) -> Sections:
    plan = {key: value for key, value in sections["plan"].items() if key != "mixture"}
    return sections | {"plan": plan | {"method": "uniform"}, "weights": {}}


def _dpis(sections: Sections, argument: str) -> Sections:
    """Accept by norm; with an argument, steer the clip norm towards accepting such a share."""
    changed = _uniform(sections, "")
    clipping: dict[str, Any] = {"kind": "importance"}
    if argument:
        clipping["acceptance"] = float(argument)
        changed["plan"]["release_std"] = _COUNT_NOISE * changed["plan"]["batch_size"]
    return changed | {"training": changed["training"] | {"clipping": clipping}}


def _smaller_batch(sections: Sections, argument: str) -> Sections:
    changed = _uniform(sections, "")
    changed["plan"]["batch_size"] *= float(argument)
    return changed


def _tempered(sections: Sections, argument: str) -> Sections:
    changed = _uniform(sections, "")
    return changed | {"model": changed["model"] | {"activation": "tempered-sigmoid"}}


def _decaying(sections: Sections, argument: str) -> Sections:
    changed = _uniform(sections, "")
    return changed | {"plan": changed["plan"] | {"noise_schedule": argument}}


def _class_budget(sections: Sections, argument: str) -> Sections:
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
        raise OwnerwiseError(f"class-budget:{argument}: expected a class below {len(given)}")
    assignment["budgets"] = [
        float(epsilon) if number in changed else value for number, value in enumerate(given)
    ]
    return sections | {"owners": owners, "weights": {}}


def _all_at_once(
    population: Population, plan: Mapping[str, Any], argument: str, seed: int
) -> Sequence[Phase]:
    return [Phase(population, plan)]


def _at_the_laxest(
    population: Population, plan: Mapping[str, Any], argument: str, seed: int
) -> Sequence[Phase]:
    laxest = np.full(len(population), population.epsilon.max())
    return [Phase(population.with_budgets(laxest), plan)]


def _lax_alone(
    population: Population, plan: Mapping[str, Any], argument: str, seed: int
) -> Sequence[Phase]:
    return [_fitting(population.keep(population.lax), plan)]


def _fewer_lax(
    population: Population, plan: Mapping[str, Any], argument: str, seed: int
) -> Sequence[Phase]:
    """Drop a share of the records of each lax owner, drawn without looking at them."""
    generator = np.random.default_rng(seed)
    kept = np.ones(len(population), dtype=bool)
    lax = np.flatnonzero(population.lax)
    kept[generator.choice(lax, round(float(argument) * len(lax)), replace=False)] = False
    return [_fitting(population.keep(kept), plan)]


def _lowered(
    population: Population, plan: Mapping[str, Any], argument: str, seed: int
) -> Sequence[Phase]:
    """Move every budget a share of its way down to the strictest: 0 is IDP-SGD, 1 is DP-SGD."""
    strictest = population.epsilon.min()
    lowered = population.epsilon - float(argument) * (population.epsilon - strictest)
    return [Phase(population.with_budgets(lowered), plan)]


def _one_after_another(
    population: Population, plan: Mapping[str, Any], argument: str, seed: int
) -> Sequence[Phase]:
    """Train on tiers of budgets in turn; steps are shared out by numbers of records."""
    tier = tiers(population.epsilon)
    parts = [population.keep(tier == number) for number in range(tier.max() + 1)]
    phases = []
    for part in parts if argument == "strict-first" else reversed(parts):
        lowest = np.full(len(part), part.epsilon.min())
        steps = max(1, round(plan["steps"] * len(part) / len(population)))
        phases.append(_fitting(part.with_budgets(lowest), {**plan, "steps": steps}))
    return phases


def tiers(epsilon: np.ndarray) -> np.ndarray:
    """Return the tier of each record, 0 the strictest: the budgets there are, or ten like-sized."""
    budgets, index, counts = np.unique(epsilon, return_inverse=True, return_counts=True)
    if len(budgets) <= MOST_TIERS:
        return index
    below = np.cumsum(counts) - counts  # records with a stricter budget
    tier = below * MOST_TIERS // len(epsilon)
    return np.unique(tier, return_inverse=True)[1][index]


def _fitting(population: Population, plan: Mapping[str, Any]) -> Phase:
    """Return a phase whose batch is at most half of the records that are left."""
    return Phase(population, {**plan, "batch_size": min(plan["batch_size"], len(population) / 2)})


def _is_share(text: str) -> bool:
    return _is_number(text) and 0 < float(text) < 1


def _is_number(text: str) -> bool:
    try:
        return 0 <= float(text) < float("inf")
    except ValueError:
        return False


def _is_kappa(text: str) -> bool:
    kappa, slash, tail = text.partition("/")
    return text == "" or (
        _is_number(kappa) and (not slash or (_is_number(tail) and float(tail) <= 1))
    )


def _is_shape(text: str) -> bool:
    parts = text.split("/")
    positive = [_is_number(part) and float(part) > 0 for part in parts]
    return text == "steps" or (len(parts) == 2 and all(positive))


def _is_class_budget(text: str) -> bool:
    which, _, epsilon = text.partition("=")
    return (which == "all" or which.isdigit()) and _is_number(epsilon) and float(epsilon) > 0


KINDS: Mapping[str, _Kind] = {
    "idp": _Kind("IDP-SGD", _without_weights, _all_at_once),
    "ino": _Kind(
        "INO-SGD",
        _ino,
        _all_at_once,
        "INO-SGD, tail {}",
        check=lambda text: text == "" or (_is_number(text) and float(text) <= 1),
        expected="a tail from 0 to 1, or the setting's",
    ),
    "ino-budget": _Kind(
        "INO-SGD budget-aware",
        _ino_budget,
        _all_at_once,
        "INO-SGD budget-aware, kappa {}",
        check=_is_kappa,
        expected="a kappa of at least 0, with /TAIL if it has its own, or the setting's",
    ),
    "ino-shape": _Kind(
        "INO-SGD, shape {}",
        _ino_shape,
        _all_at_once,
        levels=(*(f"{a}/{b}" for a in (0.5, 1, 2, 5) for b in (0.5, 1, 2, 5)), "steps"),
        check=_is_shape,
        expected="alpha/beta, such as 2/5, or steps",
    ),
    "ino-order": _Kind(
        "INO-SGD, order {}",
        _ino_order,
        _all_at_once,
        levels=ORDERS[1:],
        check=lambda text: text in ORDERS,
        expected=f"one of {', '.join(ORDERS)}",
    ),
    "uniform": _Kind("DP-SGD", _uniform, _all_at_once),
    "dpis": _Kind(
        "DPIS",
        _dpis,
        _all_at_once,
        "DPIS, acceptance {}",
        check=lambda text: text == "" or _is_share(text),
        expected="a share of records to accept, or the setting's clip norm",
    ),
    "accepted": _Kind(
        "DP-SGD at {} of the batch",
        _smaller_batch,
        _all_at_once,
        levels=("0.5",),
        check=_is_share,
        expected="a share between 0 and 1",
    ),
    "ts": _Kind("DP-SGD, tempered sigmoid", _tempered, _all_at_once),
    "decay": _Kind(
        "DP-SGD, {} noise",
        _decaying,
        _all_at_once,
        levels=("exponential",),
        check=lambda text: text in SCHEDULES,
        expected=f"one of {', '.join(SCHEDULES)}",
    ),
    "exclude": _Kind("DP-SGD without strict owners", _uniform, _lax_alone),
    "sequential": _Kind(
        "DP-SGD group by group, {}",
        _uniform,
        _one_after_another,
        levels=("strict-first", "lax-first"),
        check=lambda text: text in ("strict-first", "lax-first"),
        expected="strict-first or lax-first",
    ),
    "undersample": _Kind(
        "IDP-SGD, lax owners without {} of their records",
        _without_weights,
        _fewer_lax,
        levels=("0.1", "0.2", "0.3", "0.4", "0.5"),
        check=_is_share,
        expected="a share between 0 and 1",
    ),
    "lowered": _Kind(
        "IDP-SGD, budgets {} of the way to the strictest",
        _without_weights,
        _lowered,
        levels=("0.1", "0.2", "0.3", "0.4"),
        check=_is_share,
        expected="a share between 0 and 1",
    ),
    "class-budget": _Kind(
        "IDP-SGD, class budget {}",
        _class_budget,
        _all_at_once,
        levels=tuple(f"{number}={epsilon}" for number in range(10) for epsilon in (1, 3)),
        check=_is_class_budget,
        expected="the number of a class and its epsilon, such as 0=3, or all=3",
    ),
    "top": _Kind(
        "DP-SGD at the laxest epsilon",
        _uniform,
        _at_the_laxest,
        notes=("upper bound, NOT within the budgets",),
    ),
    "nonprivate": _Kind(
        "plain SGD", _without_weights, _all_at_once, notes=("NOT PRIVATE",), private=False
    ),
}
"""All methods. `exclude` and `sequential` are baselines of Boenisch et al. (2023), Appendix E."""
