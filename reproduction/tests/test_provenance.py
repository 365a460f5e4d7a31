"""Commands that make results again."""

from made_results import result
from ownerwise_reproduction import provenance, summary


def test_commands_can_be_typed():
    assert provenance.command("run", "MN-PC", ["idp", "ino:0.2"], [3, 4], "short", ['a.b="c"']) == (
        "ownerwise experiments run MN-PC --method idp,ino:0.2 --seeds 2 --first-seed 3 "
        "--profile short --set 'a.b=\"c\"'"
    )


def test_what_a_command_asks_for():
    text = provenance.command("tune", "MN-PC", ["idp"], [0], "short", ['a.b="c d"', "e.f=1"])
    assert provenance.asked(text) == ("short", ['a.b="c d"', "e.f=1"])
    assert provenance.asked(provenance.command("tune", "MN-PC", ["idp"], [0])) == ("paper", [])


def test_methods_with_the_same_seeds_go_together():
    (study,) = summary.studies(
        [
            *(result(method, seed) for method in ("idp", "uniform") for seed in (0, 1)),
            result("lowered-0.1", 0, spec="lowered:0.1"),
        ]
    )
    assert provenance.commands(study) == [
        "ownerwise experiments run digits --method uniform,idp --seeds 2",
        "ownerwise experiments run digits --method lowered:0.1 --seeds 1",
    ]


def test_origin():
    runs = [result(seed=0), result(seed=4, train_seconds=2.0)]
    assert provenance.origin(runs) == {
        "seeds": [0, 4],
        "train_seconds": [8.0, 2.0],
        "wall_seconds": [9.0, 9.0],
        "plans": ["0123456789abcdef"],
        "within_budgets": True,
    }
    assert provenance.origin([*runs, result(within_budgets=False)])["within_budgets"] is False
    assert provenance.origin([result(plans=[], within_budgets=False)])["within_budgets"] is None
    assert provenance.plan_hashes([result(plans=[])]) == []
