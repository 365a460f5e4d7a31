"""Which methods are compared, and what may be said about a difference.

Key figures, findings and captions take every comparison and every verdict from this module, so they
cannot contradict each other.
"""

from __future__ import annotations

from ownerwise.report.comparison import (
    METRICS,
    Comparison,
    Difference,
    MethodRuns,
    Metric,
    difference,
    shared_splits,
)
from ownerwise.wording import signed_points

WITHIN_CHANCE = "within chance"
UNTESTED = "one run each, so possibly chance"


def plainer(comparison: Comparison, method: MethodRuns) -> list[MethodRuns]:
    """Return the methods that this one builds on, those with the most in common first.

    A plainer method has the same kind of plan and only some of the extras, or it is plain training
    at the strictest budget.
    """
    own = method.extras
    kind = method.runs[0].plan.method
    found = []
    for other in comparison.methods:
        fewer, same = other.extras, other.runs[0].plan.method == kind
        strictest = other.runs[0].plan.method == "uniform" and not same and not fewer
        if (same and fewer < own) or strictest:
            found.append((not same, -len(fewer), other.number, other))
    return [other for *_, other in sorted(found, key=lambda each: each[:3])]


def rival(comparison: Comparison, method: MethodRuns, metric: Metric) -> MethodRuns | None:
    """Return the best plainer method by one metric; without any, the baseline of the others."""
    candidates = [m for m in plainer(comparison, method) if comparison.amounts(m, metric)]
    if not candidates:
        return None if method is comparison.baseline else comparison.baseline

    def quality(other: MethodRuns) -> float:
        value = comparison.amounts(other, metric)
        assert value is not None
        return value.mean if metric.higher_is_better else -value.mean

    return max(candidates, key=quality)


def pairs(comparison: Comparison) -> list[tuple[MethodRuns, MethodRuns]]:
    """Return every method with the plainer one that it has most in common with.

    A method without any is paired with the baseline, unless other methods build on it.
    """
    built_on = {other.label for m in comparison.methods for other in plainer(comparison, m)}
    found = []
    for method in comparison.methods:
        nearest = next(iter(plainer(comparison, method)), None)
        if nearest is None and method.label not in built_on:
            nearest = comparison.baseline
        if nearest is not None and nearest is not method:
            found.append((method, nearest))
    return found


def together(comparison: Comparison, method: MethodRuns, other: MethodRuns) -> str:
    """Return what a difference is due to, if it has two causes that these runs cannot separate.

    This is the case if a method with extras and individual budgets is compared with training at the
    strictest budget: individual budgets alone may be the cause.
    """
    kinds = {m.runs[0].plan.method for m in (method, other)}
    if len(kinds) == 1 or "uniform" not in kinds or not method.extras - other.extras:
        return ""
    extras = " and ".join(sorted(method.extras - other.extras))
    return f"the effect of individual budgets and {extras} together"


def changed(change: Difference) -> str:
    """Return a difference with its interval: "+4.3 points (3.1 to 5.5)"."""
    words = signed_points(change.by)
    if change.interval is None:
        return words
    low, high = (f"{100 * end:.1f}".replace("-", "−") for end in change.interval)
    return f"{words} ({low} to {high})"


def verdict(change: Difference) -> str:
    """Return "gained" or "lost" if the difference is beyond chance, else why it is not known."""
    if change.clear is None:
        return UNTESTED
    return WITHIN_CHANCE if change.outcome == "even" else change.outcome


def against(comparison: Comparison, method: MethodRuns, metric: Metric) -> str:
    """Return a method's difference from its best plainer method, with the verdict; "" if none."""
    other = rival(comparison, method, metric)
    change = None if other is None else difference(comparison, method, other, metric)
    if other is None or change is None:
        return ""
    words = f"{changed(change)} vs {other.label}: {verdict(change)}"
    cause = together(comparison, method, other)
    return f"{words} ({cause})" if cause else words


def stricter_half(comparison: Comparison, method: MethodRuns, other: MethodRuns) -> str:
    """Return what may be said about the stricter half of the groups; "" if it was not measured."""
    metric = next(metric for metric in METRICS if metric.key == "strict_half")
    change = difference(comparison, method, other, metric)
    if change is None:
        return ""
    return f"stricter half of the groups: {changed(change)}, {verdict(change)}"


def chance(comparison: Comparison) -> str:
    """Return a definition of “beyond chance”."""
    if splits := shared_splits(*comparison.methods):
        return (
            f"In parentheses: 95% confidence intervals of the differences over {len(splits)} "
            "splits of the data (Student’s t). “Beyond chance” means that the interval excludes 0; "
            "with several results per comparison, one may do so by chance."
        )
    if all(len(m.runs) > 1 for m in comparison.methods):
        return (
            "In parentheses: two standard errors over runs on either side. “Beyond chance” means "
            "that this range excludes 0, which is a rule of thumb, not a test."
        )
    return "A single run of a method cannot show how much of a difference is due to chance."
