"""Ways to give the records of a data set to owners, as experiments on individual budgets do.

Each function takes a `DataSet` and returns an `Assignment`: who owns which training record, and
each owner's epsilon, ready for `Owners(a.record_owner, a.epsilon, delta)`; and into which group a
validation or test record falls. The budgets of groups are what was declared, never computed from
labels.

These are simulations. Where owners are made of classes, the (public) owner of a record gives its
label away: fine on public benchmarks, wrong for data of one's own, which brings its owners along
(`by_column`). Seeds decide who owns what and have nothing to do with the noise of training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ownerwise.data.records import DataSet, Records
from ownerwise.errors import OwnerwiseError, name_some

ALAGGAN_SHARES = (0.34, 0.43, 0.23)
NIU_SHARES = (0.54, 0.37, 0.09)
"""Shares of records with strong, medium and weak privacy in the experiments on IDP-SGD (Boenisch
et al., 2023), after Alaggan et al. and Niu et al.; their epsilons there are 1, 2, 3."""

Budgets = Mapping[str, float] | Sequence[float]


@dataclass(frozen=True, eq=False)
class Assignment:
    """Who owns which training record, and how records are grouped for evaluation.

    Attributes:
        description: in words.
        record_owner: owner id of each training record, in their order.
        epsilon: {id: epsilon}; or an array in the order of the records where each is its own owner.
        group_budgets: {group: epsilon}, the budget declared for the group, or its mean.
        class_groups: the group of each class; or
        column: the column of `Records.columns` whose value is the group.
    """

    description: str
    record_owner: np.ndarray
    epsilon: Mapping[Any, float] | np.ndarray
    group_budgets: Mapping[str, float]
    class_groups: tuple[str, ...] = ()
    column: str | None = None

    def groups(self, records: Records) -> np.ndarray:
        """Return the name of each record's group, for records of validation or test."""
        if self.column is not None:
            return _column(records, self.column).astype(str)
        return np.array(self.class_groups)[records.targets]


def evenly(low: float, high: float, count: int) -> tuple[float, ...]:
    """Return `count` budgets in even steps from low to high."""
    return tuple(np.linspace(low, high, count).tolist())


def by_class(data: DataSet, epsilon: Budgets) -> Assignment:
    """Give each class to an owner of its name.

    `epsilon` follows the classes, or maps their names. With `evenly(0.5, 5, 10)` on CIFAR-10 this
    is setting CM of the paper on INO-SGD, with `evenly(6, 15, 10)` CL; `evenly(1, 10, 100)` on
    CIFAR-100 is CH; (5, 4, 3) on Cardiotocography is CA.
    """
    return by_classes(data, {name: (name,) for name in data.classes}, epsilon)


def by_classes(data: DataSet, classes: Mapping[str, Sequence[str]], epsilon: Budgets) -> Assignment:
    """Give several classes to each owner: `{owner: names of classes}`, each class once.

    `epsilon` follows the owners, or maps their names. Settings MN (digits 0 to 4 and 5 to 9), PN,
    CF (categories of CIFAR-100) and SU (the largest class and the rest) of the paper on INO-SGD.
    """
    budgets = _budgets(epsilon, tuple(classes))
    class_groups = _owners_of_classes(data, classes)
    return Assignment(
        f"{len(classes)} owners by class",
        np.array(class_groups)[data.train.targets],
        budgets,
        budgets,
        class_groups,
    )


def by_random_class(data: DataSet, epsilon: Sequence[float], seed: int) -> Assignment:
    """Deal the classes at random to "owner 1", "owner 2", ..., who keep their budgets.

    Over many seeds each budget meets each class, so that the difficulty of a class no longer
    stands in for its budget. Setting CR of the paper on INO-SGD.
    """
    owners = _numbered(len(epsilon))
    if len(epsilon) != len(data.classes):
        raise OwnerwiseError(
            f"{len(epsilon)} budgets for {len(data.classes)} classes; expected one for each"
        )
    dealt = np.random.default_rng(seed).permutation(len(owners))
    classes = {owner: (data.classes[at],) for owner, at in zip(owners, dealt, strict=True)}
    return by_classes(data, classes, epsilon)


def random_shares(
    data: DataSet, shares: Sequence[float], epsilon: Sequence[float], seed: int
) -> Assignment:
    """Give shares of all records, drawn at random, to "owner 1", "owner 2", ...

    Shares are met to within one record. Records of validation and test belong to no owner; they are
    grouped by class, and each group's budget is the mean over the shares.
    """
    owners = _numbered(len(shares))
    budgets = _budgets(epsilon, owners)
    problems = []
    if not shares or min(shares) < 0:
        problems.append(f"shares {list(shares)}; expected one for each owner, none below 0")
    elif abs(sum(shares) - 1) > 1e-9:
        problems.append(f"shares {list(shares)} add up to {sum(shares):g}; expected 1")
    if problems:
        raise OwnerwiseError(problems)
    ends = np.rint(np.cumsum(shares) * len(data.train)).astype(np.int64)
    index = np.searchsorted(ends, np.arange(len(data.train)), side="right")
    np.random.default_rng(seed).shuffle(index)
    mean = float(np.dot(shares, list(budgets.values())))
    return Assignment(
        f"{len(owners)} owners with random shares",
        np.array(owners)[index],
        budgets,
        dict.fromkeys(data.classes, mean),
        data.classes,
    )


def overlapping(data: DataSet, epsilon: Budgets, share: float, seed: int) -> Assignment:
    """Give each class to an owner of its name, who swaps a share of it for records of others.

    Every owner holds as many records as its class has: 1 - share of them from that class, and
    `share` drawn at random from any other classes. So a few records of a sensitive class have a
    lax owner, and the other way round. Records of validation and test are grouped by class, with
    the budget of the owner of its name. With share 0.1 setting COL, with 0.3 COM of the paper on
    INO-SGD.
    """
    budgets = _budgets(epsilon, data.classes)
    if not 0 <= share <= 1:
        raise OwnerwiseError(f"share {share:g}; expected 0 to 1")
    generator = np.random.default_rng(seed)
    targets = data.train.targets
    pooled = []
    for label in range(len(data.classes)):
        own = np.flatnonzero(targets == label)
        pooled.append(generator.choice(own, round(share * len(own)), replace=False))
    pool = np.concatenate(pooled)
    owner = targets.copy()
    owner[pool] = _deal_to_others(targets[pool], generator)
    return Assignment(
        f"{len(data.classes)} owners by class, {share:g} of each swapped",
        np.array(data.classes)[owner],
        budgets,
        budgets,
        data.classes,
    )


def one_each(
    data: DataSet,
    mean: Budgets,
    spread: float,
    seed: int,
    *,
    classes: Mapping[str, Sequence[str]] | None = None,
    distribution: str = "uniform",
    lowest: float = 0.1,
) -> Assignment:
    """Make every record its own owner, with a budget drawn around the mean of its group.

    Args:
        data: its training records become the owners 0, 1, ...
        mean: mean budget of each group, in their order or by name.
        spread: "uniform": half the width of the interval; "gaussian": the standard deviation.
        seed: of the draw.
        classes: the groups as for `by_classes`; by default each class is a group.
        distribution: "uniform" or "gaussian".
        lowest: a Gaussian draw below it is drawn again, since a budget is positive.

    Uniform with spread 0.25 on CIFAR-10 is setting CS, Gaussian with spread 0.5 and means 1 and 5
    on two categories of CIFAR-100 CFS of the paper on INO-SGD, which leaves open what
    becomes of draws below 0.
    """
    classes = {name: (name,) for name in data.classes} if classes is None else classes
    means = _budgets(mean, tuple(classes))
    smallest = min(means.values())
    problems = []
    if distribution not in ("uniform", "gaussian"):
        problems.append(f"distribution {distribution!r}; expected 'uniform' or 'gaussian'")
    if spread < 0 or (distribution == "uniform" and spread >= smallest):
        problems.append(f"spread {spread:g} around {smallest:g}; expected budgets above 0")
    if not 0 < lowest < smallest:
        problems.append(f"lowest {lowest:g}; expected above 0 and below each mean ({smallest:g})")
    if problems:
        raise OwnerwiseError(problems)
    class_groups = _owners_of_classes(data, classes)
    centre = np.array([means[group] for group in class_groups])[data.train.targets]
    generator = np.random.default_rng(seed)
    if distribution == "uniform":
        epsilon = generator.uniform(centre - spread, centre + spread)
    else:
        epsilon = generator.normal(centre, spread)
        while (low := epsilon < lowest).any():
            epsilon[low] = generator.normal(centre[low], spread)
    return Assignment(
        f"every record its own owner, {distribution} budgets around the mean of its group",
        np.arange(len(data.train)),
        epsilon,
        means,
        class_groups,
    )


def by_column(data: DataSet, column: str, epsilon: Mapping[int | str, float]) -> Assignment:
    """Let a column of the records name the owners: a subject, a clinic, `owner` of `load_table`.

    Records of validation and test are grouped by the same column.
    """
    owners = _column(data.train, column)
    budgets = {str(owner): float(value) for owner, value in epsilon.items()}
    return Assignment(f"owners by {column}", owners, dict(epsilon), budgets, column=column)


def flip_labels(targets: np.ndarray, share: float, classes: int, seed: int) -> np.ndarray:
    """Return targets of which a share, drawn at random, is another class, each equally likely.

    Records stay with the owners of their true labels: assign first, then
    `replace(data.train, targets=flip_labels(...))`. With share 0.1 setting CFN of the paper on
    INO-SGD.
    """
    if not 0 <= share <= 1 or classes < 2:
        raise OwnerwiseError(
            f"share {share:g}, {classes} classes; expected a share of 0 to 1 and at least 2 classes"
        )
    generator = np.random.default_rng(seed)
    flipped = generator.choice(len(targets), round(share * len(targets)), replace=False)
    noisy = targets.copy()
    noisy[flipped] += generator.integers(1, classes, size=len(flipped))
    return noisy % classes


def _numbered(count: int) -> tuple[str, ...]:
    """Return names of owners that sort in their order."""
    width = len(str(count))
    return tuple(f"owner {number:0{width}d}" for number in range(1, count + 1))


def _budgets(given: Budgets, names: tuple[str, ...]) -> dict[str, float]:
    """Return the budget of each name, in the order of the names."""
    problems = []
    if isinstance(given, Mapping):
        lacking = [name for name in names if name not in given]
        unknown = [name for name in given if name not in names]
        if lacking:
            problems.append(f"no budget for {name_some(lacking, repr)}; expected one for each")
        if unknown:
            problems.append(
                f"a budget for {name_some(unknown, repr)}; expected names among "
                f"{name_some(names, repr, shown=10)}"
            )
        budgets = dict(given)
    else:
        if len(given) != len(names):
            problems.append(f"{len(given)} budgets for {len(names)} names; expected one for each")
        budgets = dict(zip(names, given, strict=False))
    wrong = [f"{name} ({value!r})" for name, value in budgets.items() if not value > 0]
    if wrong:
        problems.append(f"epsilon of {name_some(wrong)}; expected a number above 0")
    if problems:
        raise OwnerwiseError(problems)
    return {name: float(budgets[name]) for name in names}


def _owners_of_classes(data: DataSet, classes: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the owner of each class, or say which classes have none, several, or do not exist."""
    owners: dict[str, list[str]] = {name: [] for name in data.classes}
    problems = []
    for owner, names in classes.items():
        for name in names:
            if name in owners:
                owners[name].append(owner)
            else:
                problems.append(f"owner {owner!r}: {data.name} has no class {name!r}")
    problems += [
        f"class {name!r} has {len(holders)} owners; expected one: "
        + ("give it to one, or leave the class out with data.only" if not holders else "remove one")
        for name, holders in owners.items()
        if len(holders) != 1
    ]
    if problems:
        raise OwnerwiseError(problems)
    return tuple(holders[0] for holders in owners.values())


def _column(records: Records, column: str) -> np.ndarray:
    if column not in records.columns:
        raise OwnerwiseError(
            f"the records have no column {column!r}; expected one of "
            f"{name_some(list(records.columns), repr, shown=20) or 'none: there are no columns'}"
        )
    return records.columns[column]


def _deal_to_others(labels: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Return a random permutation of labels in which no record keeps its own.

    Where the random permutation leaves a record its own label, it swaps with a random record for
    which both are right afterwards.
    """
    if len(labels) and 2 * np.bincount(labels).max() > len(labels):
        raise OwnerwiseError(
            "one class makes up more than half of the swapped records, so that some would have to "
            "stay; leave out records of the largest class, or classes"
        )
    dealt = generator.permutation(labels)
    for at in np.flatnonzero(dealt == labels):
        if dealt[at] == labels[at]:
            partners = np.flatnonzero((dealt != labels[at]) & (labels != labels[at]))
            other = generator.choice(partners)
            dealt[at], dealt[other] = dealt[other], dealt[at]
    return dealt
