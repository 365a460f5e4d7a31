"""Configurations: every key is known, every value fits, all problems come at once."""

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

import ownerwise as ow
from ownerwise.config import (
    read_config,
)
from ownerwise.config.reading import make_config
from ownerwise.config.sections import SECTIONS
from ownerwise.data import ASSIGNMENTS
from ownerwise.models import BUILDERS
from ownerwise.planning import PlanRequest

EXAMPLE = Path(__file__).parents[2] / "examples" / "train.toml"


def sections(**changes):
    """The example's sections, some replaced; None leaves one out."""
    found = tomllib.loads(EXAMPLE.read_text()) | changes
    return {name: content for name, content in found.items() if content is not None}


def problems(*changes, **replaced) -> list[str]:
    with pytest.raises(ow.OwnerwiseError) as caught:
        make_config(sections(**replaced), changes=changes)
    return caught.value.problems


def test_the_example_is_read_with_changes():
    config = read_config(
        EXAMPLE,
        ["training.lr=0.25", "run.label=a method", "weights.shape=[0.5, 0]", "run.seed=7",
         "training.schedule.warmup=3", "training.options.nesterov=true"],
    )  # fmt: skip
    assert config["training"]["lr"] == 0.25
    assert config["run"]["label"] == "a method"
    assert config["run"]["seed"] == 7
    assert config["weights"]["shape"] == [0.5, 0]
    assert config["training"]["schedule"] == {"name": "cosine", "warmup": 3}
    assert config["training"]["options"] == {"nesterov": True}
    assert config["plan"]["steps"] == 200
    assert (config.base, config.name) == (EXAMPLE.parent, "train")


def test_all_problems_at_once():
    found = problems(
        "training.lrr=1",
        "plann.steps=3",
        "steps=3",
        runs={"name": "x"},
        data={"name": "digit", "validation_share": 1.5, "target": "y"},
        owners={"epsilon": {"a": 1.0}, "budgets": "b.csv", "delta": 2},
        plan={"method": "smaple", "steps": 0, "mixture": 0.5, "release_std": 0},
        model={"name": "mlp", "hiden": [3]},
        training={"optimizer": "adam", "momentum": 0.9, "schedule": "cosin", "lr": "much"},
        weights={
            "kind": "ino",
            "tail": 0.4,
            "tail_length": 3.0,
            "shape": "steps",
            "alpha": 2,
            "kappa": 1,
            "order": "ownerwise.mechanisms:ByLoss",
        },
        run={"evaluate_every": True, "loggers": ["tensorbord"], "seed": 0.5},
    )
    text = "\n".join(found)
    for part in (
        "training.lrr is unknown; did you mean 'lr'?",
        "--set plann.steps=3: no section plann; did you mean 'plan'?",
        "--set steps=3: expected section.key=value",
        "section [runs] is unknown; did you mean 'run'?",
        "data.name is 'digit'; did you mean 'digits'?",
        "data.validation_share is 1.5; expected a number between 0 and 1",
        "data.target applies only to a file",
        "owners has budgets and epsilon; expected one of",
        "owners.delta is 2; expected a number between 0 and 1",
        "plan.method is 'smaple'; did you mean 'sample'?",
        "plan.steps 0: expected a whole number from 1 to",
        "plan.release_std 0: expected a positive finite number",
        "plan: 1 of steps, batch_size and noise_multiplier were given; expected two",
        "plan.mixture 0.5: only method='both' and method='individual' use a mixture",
        "mlp has no option model.hiden; did you mean 'hidden'?",
        "training.lr is 'much'; expected a positive, finite number",
        "training.momentum applies only to sgd and rmsprop, not to adam",
        "weights: pass tail (a fraction) or tail_length (absolute), not both",
        "weights.alpha and beta apply only to the Beta tail",
        "weights.kappa applies only to the order 'loss'",
        "run.evaluate_every is True; expected a whole number of at least 1",
        "run.loggers is 'tensorbord'; did you mean 'tensorboard'?",
        "run.seed is 0.5; expected a whole number",
    ):
        assert part in text, part


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": {}}, "data needs either a name"),
        ({"data": {"name": "digits", "file": "a.csv"}}, "data needs either a name"),
        ({"data": {"file": "a.csv"}}, "data.target is missing"),
        ({"data": {"name": "digits", "options": {"scal": 1}}}, "did you mean 'scale'?"),
        ({"owners": {}}, "owners has no budgets"),
        ({"owners": {"epsilon": {"a": 1.0}}}, "the owner of each record is missing"),
        ({"owners": {"assignment": {"kind": "by_clas"}}}, "did you mean 'by_class'?"),
        (
            {"owners": {"assignment": {"kind": "by_class"}}},
            "by_class needs the option owners.assignment.budgets",
        ),
        (
            {"owners": {"assignment": {"kind": "by_class", "budgets": [1, -1]}}},
            "expected a list of positive numbers",
        ),
        (
            {"owners": {"assignment": {"kind": "by_class", "budgets": [1], "seed": 1}}},
            "by_class has no option owners.assignment.seed",
        ),
        ({"model": {}}, "model.name is missing; expected one of"),
        ({"model": {"name": "mpl"}}, "did you mean 'mlp'?"),
        ({"weights": {"tail": 0.4}}, "weights.kind is missing; expected one of ino"),
        ({"weights": {"kind": "ino", "order": "los"}}, "did you mean 'loss'?"),
        ({"training": {}}, "training.lr is missing"),
        ({"training": {"lr": 1, "schedule": {"name": "cosine", "warmup": 900}}}, "warmup is 900"),
        ({"training": {"lr": 1, "clipping": {"kind": "pasc"}}}, "did you mean 'psac'?"),
        (
            {"training": {"lr": 1, "clipping": {"kind": "psac", "r": -1}}},
            "training.clipping.r must be at least 1e-06 and finite, got -1",
        ),
        (
            {"training": {"lr": 1, "clipping": {"kind": "importance", "acceptance": 2}}},
            "training.clipping.acceptance 2: expected a number between 0 and 1",
        ),
        (
            {"plan": {"steps": 5, "batch_size": 9, "noise_schedule": "exponentail"}},
            "plan.noise_schedule is 'exponentail'; did you mean 'exponential'?",
        ),
        (
            {"plan": {"steps": 5, "batch_size": 9, "noise_schedule": [[5, 1.0], [3]]}},
            "plan.noise_schedule [[5, 1.0], [3]]: expected a name, or segments",
        ),
        (
            {"plan": {"steps": 5, "batch_size": 9, "release_share": 0.1, "release_std": 3.0}},
            "plan.release_share and release_std were both given",
        ),
        (
            {"plan": {"steps": 5, "batch_size": 9, "release_noise": "laplac"}},
            "plan.release_noise is 'laplac'; did you mean 'laplace'?",
        ),
        (
            {"plan": {"steps": "many", "batch_size": 9, "noise_schedule": 3, "mixture": "much"}},
            "plan.steps 'many': expected a whole number from 1 to",
        ),
        (
            {"training": {"lr": 1, "averaging": 1.0}},
            "training.averaging is 1.0; expected a decay of at least 0 and below 1",
        ),
        ({"training": {"lr": True}}, "training.lr is True"),
        ({"training": {"lr": float("inf")}}, "training.lr is inf"),
        ({"weights": {"kind": "ino", "shape": [0.2, 0.5]}}, "must not rise"),
        (
            {"weights": {"kind": "ino", "kappa": -1}},
            "weights.kappa must be a finite number of at least 0, got -1",
        ),
        (
            {"weights": {"kind": "ino", "width": 0.001}},
            "weights.width must be 0 or a number from 0.01 to 10, got 0.001",
        ),
        ({"plan": 3}, "plan is 3; expected a section [plan] with keys"),
    ],
)
def test_what_is_wrong_is_said(change, message):
    assert message in "\n".join(problems(**change))


def test_the_plan_section_takes_every_argument_of_plan_but_constraints():
    arguments = {field.name for field in fields(PlanRequest)}
    assert set(SECTIONS["plan"]) == arguments - {"constraints"}


def test_what_the_interface_takes_the_configuration_takes():
    """A schedule of segments gives the number of steps; averaging may be 0."""
    plan = {"batch_size": 9, "noise_schedule": [[5, 1.0], [5, 0.5]], "release_share": 0.1}
    config = make_config(sections(plan=plan, training={"lr": 1, "averaging": 0}))
    assert config["plan"] == plan


def test_files_that_are_no_configuration(tmp_path):
    with pytest.raises(ow.OwnerwiseError, match="there is no configuration file"):
        read_config(tmp_path / "absent.toml")
    path = tmp_path / "bad.toml"
    path.write_text("[run\n")
    with pytest.raises(ow.OwnerwiseError, match="is not TOML"):
        read_config(path)


@pytest.mark.parametrize(
    ("section", "key"), [(section, key) for section, keys in SECTIONS.items() for key in keys]
)
def test_every_key_says_what_it_wants_and_refuses_something(section, key):
    assert SECTIONS[section][key].expected
    found = problems(**{section: {**sections().get(section, {}), key: object()}})
    assert any(re.search(rf"\b{section}\b.*\b{key}\b", text) for text in found), found


def test_every_model_and_assignment_that_is_offered_exists():
    for name in BUILDERS:
        assert BUILDERS.options(name)
    for kind in ASSIGNMENTS:
        assert ASSIGNMENTS.options(kind)["budgets"]
