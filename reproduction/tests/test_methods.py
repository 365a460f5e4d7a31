"""Every method: what it makes of records and budgets, and a few steps of it."""

import json

import numpy as np
import pytest

from ownerwise.errors import OwnerwiseError
from ownerwise.mechanisms import ORDERS
from ownerwise.planning import plan as make_plan
from ownerwise_reproduction import method_phases, methods, settings
from ownerwise_reproduction.population import populate
from ownerwise_reproduction.trials import Trial, run_trial

TINY = ("plan.steps=3", "run.evaluate_every=2", 'plan.accountant="rdp"')
DIGITS = settings.setting("digits")


def one(spec):
    (method,) = methods.parse(spec)
    return method


def phases(spec, **plan):
    config = Trial(DIGITS, one(spec), 0).config
    options = {**config["plan"], **plan}
    population = populate(config)
    return population, one(spec).phases(population, options, seed=0)


@pytest.mark.parametrize(
    "spec",
    ["idp", "ino", "ino:0.2", "ino-budget:2", "ino-shape:2/5", "ino-order:random", "uniform",
     "idp-calibrated", "ino-calibrated", "exclude", "sequential:lax-first",
     "dpis", "dpis:0.4", "smaller-batch", "tempered-sigmoid", "falling-noise",
     "undersample:0.5", "lowered:0.4", "class-budget:0=3", "same-noise:larger-batch",
     "top", "nonprivate"],
)  # fmt: skip
def test_a_method_runs(spec, tmp_path):
    trial = Trial(DIGITS, one(spec), 0, "paper", TINY)
    result = run_trial(trial, tmp_path / "run")
    json.dumps(result, allow_nan=False)
    steps = [line["step"] for line in result["history"]]
    assert steps == sorted(set(steps))
    assert steps[0] == 0
    assert result["within_budgets"] == (spec not in ("top", "nonprivate"))
    assert ("NOT PRIVATE" in result["not_private"]) == (spec == "nonprivate")
    assert result["train_seconds"] <= result["wall_seconds"]
    assert set(result["final"]["groups"]) == set("0123456789")


def test_methods_without_argument_stand_for_all_levels():
    found = [method.spec for method in methods.parse("undersample,lowered,sequential,idp,idp")]
    assert found == [
        *(f"undersample:0.{k}" for k in range(1, 6)),
        *(f"lowered:0.{k}" for k in range(1, 5)),
        "sequential:strict-first",
        "sequential:lax-first",
        "idp",
    ]
    assert len(methods.parse("class-budget")) == 20
    assert len(methods.parse("ino-shape")) == 17
    ablated = [method.argument for method in methods.parse("ino-order")]
    assert {"loss", *ablated} == set(ORDERS)


def test_labels_name_what_follows_the_colon():
    found = methods.parse("ino,ino:0.6,ino-budget,ino-budget:2,ino-budget:2/0.9,ino-shape:2/5")
    assert [method.label.removeprefix("INO-SGD") for method in found] == [
        "",
        ", tail 0.6",
        " budget-aware",
        " budget-aware, kappa 2",
        " budget-aware, kappa 2, tail 0.9",
        ", shape 2/5",
    ]


def test_all_problems_of_a_list_at_once():
    with pytest.raises(OwnerwiseError) as error:
        methods.parse(
            "idq,lowered:2,sequential:up,ino:1.5,idp:3,class-budget:x=1,ino-shape:2,ino-order:up,"
            "ino-budget:1/2"
        )
    assert len(error.value.problems) == 9
    with pytest.raises(OwnerwiseError, match="no method"):
        methods.parse(" , ")


def test_higher_budgets_buy_records_or_steps_at_the_noise_of_dp_sgd():
    """IDP-SGD, Appendix C.1."""
    population, (usual,) = phases("uniform")
    owners = population.owners()
    strictest = make_plan(owners, **usual.plan)
    for argument, larger in (("larger-batch", "batch_size"), ("more-steps", "steps")):
        _, (phase,) = phases(f"same-noise:{argument}")
        assert phase.plan[larger] > usual.plan[larger]
        same = {"steps", "batch_size"} - {larger}
        assert all(phase.plan[name] == usual.plan[name] for name in same)
        made = make_plan(owners, **phase.plan)
        assert made.method == "sample"
        assert made.noise_std == pytest.approx(strictest.noise_std, rel=0.01)
        assert (made.epsilon() <= owners.epsilon).all()


def test_sections():
    sections = DIGITS.configure(0).sections
    assert one("idp").sections(sections)["weights"] == {}
    assert one("ino").sections(sections)["weights"] == {"kind": "ino", "tail": 0.4}
    assert one("ino:0.2").sections(sections)["weights"]["tail"] == 0.2
    assert one("ino-budget").sections(sections)["weights"]["kappa"] == 1.0
    assert one("ino-budget:2").sections(sections)["weights"]["kappa"] == 2.0
    both = one("ino-budget:2/0.9").sections(sections)["weights"]
    assert (both["kappa"], both["tail"]) == (2.0, 0.9)
    assert one("ino-shape:2/5").sections(sections)["weights"] == {
        "kind": "ino", "tail": 0.4, "alpha": 2.0, "beta": 5.0
    }  # fmt: skip
    assert one("ino-shape:steps").sections(sections)["weights"]["shape"] == "steps"
    assert one("ino-shape:2/5").slug == "ino-shape-2-5"
    assert one("ino-order:random").sections(sections)["weights"]["order"] == "random"
    assert one("uniform").sections(sections)["plan"]["method"] == "uniform"
    changed = one("class-budget:3=1").sections(sections)["owners"]["assignment"]["budgets"]
    assert changed[3] == 1.0
    assert changed[4] == 2.5
    assert sections["owners"]["assignment"]["budgets"][3] == 2.0  # the setting stays
    assert set(one("class-budget:all=3").sections(sections)["owners"]["assignment"]["budgets"]) == {
        3.0
    }
    with pytest.raises(OwnerwiseError, match="below 10"):
        one("class-budget:10=1").sections(sections)
    with pytest.raises(OwnerwiseError, match="by_class"):
        one("class-budget:0=1").sections(settings.setting("MN-PC").configure(0).sections)


def test_calibrated_runs_pay_for_the_release_and_shift_the_model(tmp_path):
    changes = TINY[1:]  # all steps: after a few, the release finds nothing to correct
    runs = {
        spec: run_trial(Trial(DIGITS, one(spec), 0, "paper", changes), tmp_path / spec)
        for spec in ("idp", "idp-calibrated", "ino-calibrated")
    }
    plain, *paid = (runs[spec]["plans"][0] for spec in runs)
    assert "calibration_noise_std" not in plain
    for plan in paid:
        assert plan["calibration_noise_std"] > 0
        assert plan["noise_std"] > plain["noise_std"]  # the release leaves less for training
        assert 0.9 * 0.5 < plan["epsilon_spent"][0] <= 0.5
    lines = (tmp_path / "idp-calibrated" / "history.jsonl").read_text().splitlines()
    calibration = json.loads(lines[-1])["calibration"]
    assert len(calibration["shift"]) == 10
    before, after = calibration["before"]["accuracy"], runs["idp-calibrated"]["final"]["accuracy"]
    assert before != after


def test_excluding_keeps_lax_owners_alone():
    population, (phase,) = phases("exclude")
    kept = phase.population
    assert kept.epsilon.min() == 3.0  # the mean is 2.75
    assert len(kept) == (population.epsilon >= 3).sum() == len(kept.data.train)
    assert set(kept.record_owner) == set("56789")


def test_who_is_lax_depends_on_owners_not_on_how_many_records_they_have():
    population, _ = phases("idp")
    few_strict = population.keep(
        (population.epsilon > 2.75) | (np.arange(len(population)) % 20 == 0)
    )
    assert few_strict.epsilon.mean() > 3.0
    assert few_strict.epsilon[few_strict.lax].min() == 3.0


def test_undersampling_drops_records_of_lax_owners():
    population, (phase,) = phases("undersample:0.3")
    strict = population.epsilon < population.epsilon.mean()
    kept = phase.population.epsilon
    assert (kept < 2.75).sum() == strict.sum()
    assert (kept > 2.75).sum() == (~strict).sum() - round(0.3 * (~strict).sum())


def test_lowered_budgets_lie_between_the_strictest_and_the_own():
    population, (phase,) = phases("lowered:0.4")
    assert np.allclose(phase.population.epsilon, 0.5 + 0.6 * (population.epsilon - 0.5))


def test_top_takes_the_laxest_budget_for_all():
    _, (phase,) = phases("top")
    assert set(phase.population.epsilon) == {5.0}


@pytest.mark.parametrize(("order", "first"), [("strict-first", 0.5), ("lax-first", 5.0)])
def test_groups_come_one_after_another_at_their_own_budgets(order, first):
    population, found = phases(f"sequential:{order}")
    assert len(found) == 10
    assert set(found[0].population.epsilon) == {first}
    assert sum(len(phase.population) for phase in found) == len(population)
    assert abs(sum(phase.plan["steps"] for phase in found) - 60) <= 5
    assert all(phase.plan["batch_size"] <= len(phase.population) / 2 for phase in found)


def test_every_record_spends_in_its_own_phase_alone(tmp_path):
    trial = Trial(DIGITS, one("sequential:strict-first"), 0, "paper", ("plan.steps=10", *TINY[2:]))
    plans = run_trial(trial, tmp_path / "run")["plans"]
    owners = [owner for plan in plans for owner in plan["owners"]]
    assert sorted(owners) == list("0123456789")  # each once
    for plan in plans:
        for owner in plan["owners"].values():
            assert 0.9 * owner["budget"] < owner["epsilon_spent"] <= owner["budget"]


def test_many_budgets_become_ten_tiers_of_like_size():
    epsilon = np.random.default_rng(0).uniform(0.5, 5, 1000)
    tier = method_phases.tiers(epsilon)
    assert set(tier) == set(range(10))
    assert np.bincount(tier).tolist() == [100] * 10
    assert epsilon[tier == 0].max() < epsilon[tier == 1].min()


def test_options_of_a_run_reach_the_training(tmp_path):
    changes = (*TINY, 'training.clipping="auto_s"')
    result = run_trial(Trial(DIGITS, one("idp"), 0, "paper", changes), tmp_path / "run")
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stored["clipping"]["kind"] == "AutoS"
    assert result["plans"][0]["accountant"] == "rdp"


def test_gradients_are_counted_and_a_run_that_goes_on_counts_on(tmp_path):
    changes = (*TINY, "plan.clip_norm=20", "plan.steps=4")
    whole = run_trial(Trial(DIGITS, one("dpis"), 0, "paper", changes), tmp_path / "whole")
    found = whole["gradients"]
    assert 0 < found["summed"] < 0.6 * found["evaluated"]
    assert found["evaluated"] == pytest.approx(4 * whole["config"]["plan"]["batch_size"], rel=0.4)
    again = run_trial(Trial(DIGITS, one("dpis"), 0, "paper", changes), tmp_path / "whole")
    assert again["gradients"] == found
    plain = run_trial(
        Trial(DIGITS, one("smaller-batch:0.25"), 0, "paper", changes), tmp_path / "plain"
    )
    batch = whole["config"]["plan"]["batch_size"]
    assert plain["gradients"] == {"evaluated": batch, "summed": batch}


def test_rivals_of_importance_sampling():
    sections = DIGITS.configure(0).sections
    steered = one("dpis:0.3").sections(sections)
    assert steered["training"]["clipping"] == {"kind": "importance", "acceptance": 0.3}
    assert steered["plan"]["release_std"] == 0.1 * sections["plan"]["batch_size"]
    assert one("dpis").sections(sections)["training"]["clipping"] == {"kind": "importance"}
    assert one("smaller-batch:0.5").sections(sections)["plan"]["batch_size"] == (
        0.5 * sections["plan"]["batch_size"]
    )
    assert one("tempered-sigmoid").sections(sections)["model"]["activation"] == "tempered-sigmoid"
    assert one("falling-noise:time").sections(sections)["plan"]["noise_schedule"] == "time"
    assert "release_std" not in sections["plan"]
    for spec in ("dpis", "smaller-batch:0.5", "tempered-sigmoid", "falling-noise:step"):
        assert one(spec).sections(sections)["plan"]["method"] == "uniform"
    with pytest.raises(OwnerwiseError) as error:
        methods.parse("dpis:2,smaller-batch:1,tempered-sigmoid:1,falling-noise:fast")
    assert len(error.value.problems) == 4
