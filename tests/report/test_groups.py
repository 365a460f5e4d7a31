import numpy as np

from ownerwise.report.groups import ValidationGroup, by_member, groups_of, most_telling, nouns_of
from tools.report_tools import made_run, wide_plan


def test_the_strictest_budget_comes_first_and_names_are_in_natural_order():
    run = made_run(budgets={"g10": 1.0, "g2": 1.0, "lax": 4.0})
    for line in run.history:
        line["validation"]["groups"]["unknown"] = {"loss": 1.0, "recall": 0.5, "records": 3}
    found = groups_of([run], "validation")
    assert [(group.name, group.epsilon) for group in found] == [
        ("g2", 1.0),
        ("g10", 1.0),
        ("lax", 4.0),
        ("unknown", None),
    ]


def test_only_groups_that_all_runs_have_are_compared():
    both = [made_run(budgets={"a": 1.0, "b": 2.0}), made_run(budgets={"b": 2.0, "c": 3.0})]
    assert [group.name for group in groups_of(both, "validation")] == ["b"]
    assert groups_of(both, None) == ()


def test_many_owners_become_ranges_of_budgets():
    budgets = {f"patient-{i}": e for i, e in enumerate(np.geomspace(0.3, 9.0, 60).tolist())}
    run = made_run(plan=wide_plan(), budgets=budgets, evaluations=2)
    found = groups_of([run], "validation")
    assert len(found) == 8
    assert sum(len(group.members) for group in found) == 60
    assert not any("patient" in group.name for group in found)
    assert found[0].name == "ε 0.3 to 0.449 per record (8 owners)"
    # A range's recall is the mean over its members.
    last = run.history[-1]["validation"]
    recalls = [last["groups"][name]["recall"] for name in found[0].members]
    assert found[0].of(last, "recall") == np.mean(recalls)
    assert len(by_member(found, budgets)) == 60


def test_owners_of_one_budget_each_make_one_class():
    budgets = {str(i): (1.0, 2.0, 4.0)[i % 3] for i in range(60)}
    found = groups_of([made_run(budgets=budgets, evaluations=2)], "validation")
    assert [group.name for group in found] == [f"ε {e} per record (20 owners)" for e in (1, 2, 4)]


def test_fifty_groups_keep_their_names():
    budgets = {str(i): 1.0 + i for i in range(50)}
    assert len(groups_of([made_run(budgets=budgets, evaluations=2)], "validation")) == 50


def test_strictest_worst_and_laxest_are_shown_first():
    groups = [ValidationGroup(str(i), (str(i),), float(i)) for i in range(30)]
    recalls = [0.9] * 30
    recalls[17] = 0.1
    assert [g.name for g in most_telling(groups, recalls, 3)] == ["0", "17", "29"]
    assert len(most_telling(groups, recalls, 12)) == 12
    assert most_telling(groups, recalls, 99) == groups


def test_groups_are_called_what_they_are():
    assert nouns_of([made_run()]) == ("Owner", "owners")
    assert nouns_of([made_run(groups_are="classes")]) == ("Class", "classes")
    assert nouns_of([made_run(groups_are="wards")]) == ("Group", "groups")
    assert nouns_of([made_run(), made_run(groups_are="classes")]) == ("Group", "groups")
