"""The methods to compare, by their names on the command line.

`parse("idp,undersample:0.3")` reads a list of methods. If a method has several levels and its
argument is omitted, it stands for all levels: `undersample` means `undersample:0.1` to
`undersample:0.5`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ownerwise.errors import OwnerwiseError
from ownerwise.planning.noise_schedules import SCHEDULES
from ownerwise_reproduction import method_configs as configs
from ownerwise_reproduction import method_phases as phases
from ownerwise_reproduction.method_configs import Sections
from ownerwise_reproduction.method_phases import Phase
from ownerwise_reproduction.population import Population

ABLATED_ORDERS = ("negative-loss", "random", "owner-then-loss")
"""Orders of records to compare with INO-SGD's own, by their names in `orders`."""


@dataclass(frozen=True)
class Method:
    """A method with its argument, such as `undersample` with the argument 0.3.

    Attributes:
        name: name on the command line.
        argument: the text after the colon, or "".
        label: name in tables and legends.
        notes: caveats shown with the method's results; empty if it stays within all budgets.
        private: False for plain SGD.
    """

    name: str
    argument: str
    label: str
    notes: tuple[str, ...]
    private: bool

    @property
    def spec(self) -> str:
        """Name and argument, in the form that `parse` reads."""
        return f"{self.name}:{self.argument}" if self.argument else self.name

    @property
    def slug(self) -> str:
        """Name and argument, in the form used in file names."""
        return self.spec.replace(":", "-").replace("/", "-")

    def sections(self, sections: Mapping[str, Mapping[str, Any]]) -> Sections:
        """Return the configuration sections for training with this method."""
        return KINDS[self.name].sections({k: dict(v) for k, v in sections.items()}, self.argument)

    def phases(self, population: Population, plan: Mapping[str, Any], seed: int) -> Sequence[Phase]:
        """Return the training phases of a run, with their plan options."""
        return KINDS[self.name].phases(population, plan, self.argument, seed)


@dataclass(frozen=True)
class _MethodKind:
    """A kind of method, without its argument."""

    label: str
    sections: Callable[[Sections, str], Sections]
    phases: Callable[[Population, Mapping[str, Any], str, int], Sequence[Phase]]
    with_argument: str = ""
    slash: str = "/"  # replaces a slash of the argument in labels
    levels: tuple[str, ...] = ("",)
    check: Callable[[str], bool] = lambda argument: argument == ""
    expected: str = "no argument"
    notes: tuple[str, ...] = ()
    private: bool = True


def parse(text: str) -> list[Method]:
    """Return the methods in a comma-separated list, or raise an error that lists all problems."""
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
            template = (level and kind.with_argument) or kind.label
            label = template.format(level.replace("/", kind.slash))
            made = Method(name, level, label, kind.notes, kind.private)
            found[made.slug] = made
    if not found and not problems:
        problems.append(f"no method given; expected one or more of {', '.join(KINDS)}")
    if problems:
        raise OwnerwiseError(problems)
    return list(found.values())


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


KINDS: Mapping[str, _MethodKind] = {
    "idp": _MethodKind("IDP-SGD", configs.without_weights, phases.all_at_once),
    "ino": _MethodKind(
        "INO-SGD",
        configs.ino,
        phases.all_at_once,
        "INO-SGD, tail {}",
        check=lambda text: text == "" or (_is_number(text) and float(text) <= 1),
        expected="a tail from 0 to 1, or no argument for the setting's tail",
    ),
    "idp-calibrated": _MethodKind(
        "IDP-SGD calibrated", configs.calibrated(configs.without_weights), phases.all_at_once
    ),
    "ino-calibrated": _MethodKind(
        "INO-SGD calibrated", configs.calibrated(configs.ino), phases.all_at_once
    ),
    "ino-budget": _MethodKind(
        "INO-SGD budget-aware",
        configs.ino_budget,
        phases.all_at_once,
        "INO-SGD budget-aware, kappa {}",
        slash=", tail ",
        check=_is_kappa,
        expected="a kappa of at least 0, optionally with /TAIL, or no argument for the setting's "
        "values",
    ),
    "ino-shape": _MethodKind(
        "INO-SGD, shape {}",
        configs.ino_shape,
        phases.all_at_once,
        levels=(*(f"{a}/{b}" for a in (0.5, 1, 2, 5) for b in (0.5, 1, 2, 5)), "steps"),
        check=_is_shape,
        expected="alpha/beta, such as 2/5, or steps",
    ),
    "ino-order": _MethodKind(
        "INO-SGD, order {}",
        configs.ino_order,
        phases.all_at_once,
        levels=ABLATED_ORDERS,
        check=lambda text: text in ("loss", *ABLATED_ORDERS),
        expected=f"one of loss, {', '.join(ABLATED_ORDERS)}",
    ),
    "uniform": _MethodKind("DP-SGD", configs.uniform, phases.all_at_once),
    "same-noise": _MethodKind(
        "IDP-SGD at the noise of DP-SGD, {}",
        configs.without_weights,
        phases.at_the_noise_of_dp_sgd,
        levels=("larger-batch", "more-steps"),
        check=lambda text: text in ("larger-batch", "more-steps"),
        expected="larger-batch or more-steps",
    ),
    "dpis": _MethodKind(
        "DPIS",
        configs.dpis,
        phases.all_at_once,
        "DPIS, acceptance {}",
        check=lambda text: text == "" or _is_share(text),
        expected="the fraction of records to accept, or no argument for the setting's clip norm",
    ),
    "smaller-batch": _MethodKind(
        "DP-SGD at {} of the batch",
        configs.smaller_batch,
        phases.all_at_once,
        levels=("0.5",),
        check=_is_share,
        expected="a fraction between 0 and 1",
    ),
    "tempered-sigmoid": _MethodKind(
        "DP-SGD, tempered sigmoid", configs.tempered_sigmoid, phases.all_at_once
    ),
    "falling-noise": _MethodKind(
        "DP-SGD, {} noise",
        configs.falling_noise,
        phases.all_at_once,
        levels=("exponential",),
        check=lambda text: text in SCHEDULES,
        expected=f"one of {', '.join(SCHEDULES)}",
    ),
    "exclude": _MethodKind("DP-SGD without strict owners", configs.uniform, phases.lax_alone),
    "sequential": _MethodKind(
        "DP-SGD group by group, {}",
        configs.uniform,
        phases.one_after_another,
        levels=("strict-first", "lax-first"),
        check=lambda text: text in ("strict-first", "lax-first"),
        expected="strict-first or lax-first",
    ),
    "undersample": _MethodKind(
        "IDP-SGD, lax owners without {} of their records",
        configs.without_weights,
        phases.fewer_lax,
        levels=("0.1", "0.2", "0.3", "0.4", "0.5"),
        check=_is_share,
        expected="a fraction between 0 and 1",
    ),
    "lowered": _MethodKind(
        "IDP-SGD, budgets {} of the way to the strictest",
        configs.without_weights,
        phases.lowered,
        levels=("0.1", "0.2", "0.3", "0.4"),
        check=_is_share,
        expected="a fraction between 0 and 1",
    ),
    "class-budget": _MethodKind(
        "IDP-SGD, class budget {}",
        configs.class_budget,
        phases.all_at_once,
        levels=tuple(f"{number}={epsilon}" for number in range(10) for epsilon in (1, 3)),
        check=_is_class_budget,
        expected="the number of a class and its epsilon, such as 0=3, or all=3",
    ),
    "top": _MethodKind(
        "DP-SGD at the laxest epsilon",
        configs.uniform,
        phases.at_the_laxest,
        notes=("upper bound, NOT within the budgets",),
    ),
    "nonprivate": _MethodKind(
        "plain SGD",
        configs.without_weights,
        phases.all_at_once,
        notes=("NOT PRIVATE",),
        private=False,
    ),
}
"""All methods. `exclude` and `sequential` are baselines from Boenisch et al. (2023), Appendix E."""
