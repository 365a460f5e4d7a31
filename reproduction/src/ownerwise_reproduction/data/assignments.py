"""Simulated owners: ways to assign the records of a public data set to owners, as in the papers.

Each function takes a `DataSet` and returns an `Assignment`. Seeds determine who owns which records;
they do not affect the noise in training. If owners are formed from classes, the (public) owner of a
record reveals its label. This is acceptable for public benchmarks, but not for private data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ownerwise.data import Assignment, DataSet
from ownerwise.data.assign import Budgets, by_classes, named_budgets, owners_of_classes
from ownerwise.errors import OwnerwiseError


def by_random_class(data: DataSet, budgets: Sequence[float], seed: int) -> Assignment:
    """Assign the classes at random to "owner 1", "owner 2", ..., whose budgets are fixed.

    Over many seeds, each budget is combined with each class, so the difficulty of a class is not
    confounded with its budget. This is setting CR of the INO-SGD paper.
    """
    owners = _numbered(len(budgets))
    if len(budgets) != len(data.classes):
        raise OwnerwiseError(
            f"{len(budgets)} budgets for {len(data.classes)} classes; expected one for each"
        )
    dealt = np.random.default_rng(seed).permutation(len(owners))
    classes = {owner: (data.classes[at],) for owner, at in zip(owners, dealt, strict=True)}
    return by_classes(data, classes, budgets)


def random_shares(
    data: DataSet, shares: Sequence[float], budgets: Sequence[float], seed: int
) -> Assignment:
    """Divide all records at random among "owner 1", "owner 2", ..., according to the given shares.

    Each owner's number of records matches the owner's share to within one record. Validation and
    test records belong to no owner; they are grouped by class, and each group's budget is the mean
    of the owners' budgets, weighted by their shares.
    """
    owners = _numbered(len(shares))
    declared = named_budgets(budgets, owners)
    problems = []
    if not shares or min(shares) < 0:
        problems.append(f"shares {list(shares)}; expected one for each owner, and none below 0")
    elif abs(sum(shares) - 1) > 1e-9:
        problems.append(f"shares {list(shares)} add up to {sum(shares):g}; expected 1")
    if problems:
        raise OwnerwiseError(problems)
    ends = np.rint(np.cumsum(shares) * len(data.train)).astype(np.int64)
    index = np.searchsorted(ends, np.arange(len(data.train)), side="right")
    np.random.default_rng(seed).shuffle(index)
    mean = float(np.dot(shares, list(declared.values())))
    return Assignment(
        f"{len(owners)} owners with random shares",
        np.array(owners)[index],
        declared,
        dict.fromkeys(data.classes, mean),
        data.classes,
    )


def overlapping(data: DataSet, budgets: Budgets, share: float, seed: int) -> Assignment:
    """Assign each class to an owner of the same name, then swap a fraction of the owners' records.

    Every owner has as many records as the class of the same name: a fraction 1 - `share` from that
    class, and a fraction `share` drawn at random from the other classes. A few records of a class
    with a strict owner therefore belong to a lax owner, and vice versa. Validation and test records
    are grouped by class; each group has the budget of the owner of the same name. Setting COL of
    the INO-SGD paper has `share` 0.1, and setting COM has 0.3.
    """
    declared = named_budgets(budgets, data.classes)
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
        f"{len(data.classes)} owners by class, {share:g} of each owner's records swapped",
        np.array(data.classes)[owner],
        declared,
        declared,
        data.classes,
    )


def one_each(
    data: DataSet,
    budgets: Budgets,
    spread: float,
    seed: int,
    *,
    classes: Mapping[str, Sequence[str]] | None = None,
    distribution: str = "uniform",
    lowest: float = 0.1,
) -> Assignment:
    """Make each record its own owner, with a budget drawn around the mean of its group.

    Args:
        data: the data set; its training records become owners 0, 1, ..., one record each.
        budgets: mean budget of each group, in the order of the groups or by name.
        spread: half the interval's width for "uniform", or the standard deviation for "gaussian".
        seed: seed for the draws.
        classes: the groups, as for `by_classes`; by default, each class is a group.
        distribution: "uniform" or "gaussian".
        lowest: lowest budget; Gaussian draws below it are redrawn, because budgets must be
            positive.

    Uniform budgets with a spread of 0.25 on CIFAR-10 give setting CS of the INO-SGD paper; Gaussian
    budgets with a spread of 0.5 and means of 1 and 5 on two categories of CIFAR-100 give CFS. The
    paper does not say how it handles draws below 0.
    """
    classes = {name: (name,) for name in data.classes} if classes is None else classes
    means = named_budgets(budgets, tuple(classes))
    smallest = min(means.values())
    problems = []
    if distribution not in ("uniform", "gaussian"):
        problems.append(f"distribution {distribution!r}; expected 'uniform' or 'gaussian'")
    if spread < 0 or (distribution == "uniform" and spread >= smallest):
        problems.append(f"spread {spread:g} around {smallest:g}; expected budgets above 0")
    if not 0 < lowest < smallest:
        problems.append(
            f"lowest {lowest:g}; expected a value above 0 and below each mean ({smallest:g})"
        )
    if problems:
        raise OwnerwiseError(problems)
    class_groups = owners_of_classes(data, classes)
    centre = np.array([means[group] for group in class_groups])[data.train.targets]
    generator = np.random.default_rng(seed)
    if distribution == "uniform":
        epsilon = generator.uniform(centre - spread, centre + spread)
    else:
        epsilon = generator.normal(centre, spread)
        while (low := epsilon < lowest).any():
            epsilon[low] = generator.normal(centre[low], spread)
    return Assignment(
        f"each record is its own owner, with {distribution} budgets around its group's mean",
        np.arange(len(data.train)),
        epsilon,
        means,
        class_groups,
    )


def flip_labels(targets: np.ndarray, share: float, classes: int, seed: int) -> np.ndarray:
    """Return the targets after changing a fraction of them, chosen at random, to other classes.

    A changed target becomes any other class with equal probability. To keep each record with the
    owner of its true label, assign the owners first, then call
    `replace(data.train, targets=flip_labels(...))`. Setting CFN of the INO-SGD paper has `share`
    0.1.
    """
    if not 0 <= share <= 1 or classes < 2:
        raise OwnerwiseError(
            f"share {share:g}, {classes} classes; expected a share from 0 to 1 and at least 2 "
            "classes"
        )
    generator = np.random.default_rng(seed)
    flipped = generator.choice(len(targets), round(share * len(targets)), replace=False)
    noisy = targets.copy()
    noisy[flipped] += generator.integers(1, classes, size=len(flipped))
    return noisy % classes


def _numbered(count: int) -> tuple[str, ...]:
    """Return numbered owner names whose alphabetical order is their numerical order."""
    width = len(str(count))
    return tuple(f"owner {number:0{width}d}" for number in range(1, count + 1))


def _deal_to_others(labels: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Return a random permutation of labels in which no record keeps its own label.

    A record that would keep its own label swaps with a random record so that both get a different
    label.
    """
    if len(labels) and 2 * np.bincount(labels).max() > len(labels):
        raise OwnerwiseError(
            "one class makes up more than half of the swapped records, so some cannot be "
            "swapped; leave out records of the largest class, or whole classes"
        )
    dealt = generator.permutation(labels)
    for at in np.flatnonzero(dealt == labels):
        if dealt[at] == labels[at]:
            partners = np.flatnonzero((dealt != labels[at]) & (labels != labels[at]))
            other = generator.choice(partners)
            dealt[at], dealt[other] = dealt[other], dealt[at]
    return dealt
