"""States of plugs: only those of the same plug, with the same settings, are loaded."""

import pytest
import torch
from torch.nn import functional

import ownerwise as ow
from ownerwise.mechanisms import AcceptanceSteering, constraints
from ownerwise.step import checkpoint_file
from tools import step_tools as tools

PART = ow.Partition({"sex": ("F", "M"), "label": (0, 1, 2)})


def constrained(max_gap, **options):
    parity = constraints.demographic_parity(PART, "sex", max_gap=max_gap)
    fair = ow.RateConstraints(parity, **options)
    model, inputs, labels = tools.example("mlp", 6)
    loss = fair.penalised(functional.cross_entropy)
    step = tools.make_step(model, loss, plan=tools.make_plan(release_std=4.0), release=fair)
    return step, inputs, PART.targets(labels, {"sex": ["F", "M"] * 3})


def steered(**options):
    model = torch.nn.Linear(4, 3)
    rule = ow.ImportanceSampling(**options)
    plan = tools.make_plan(release_std=4.0)
    return tools.make_step(model, functional.cross_entropy, plan=plan, clipping=rule)


def test_the_state_of_other_constraints_of_the_same_shape_is_refused(tmp_path):
    step, inputs, targets = constrained(0.02)
    step(tools.batch_of(inputs, targets))
    step.save(tmp_path)
    with pytest.raises(ow.OwnerwiseError, match=r"the release in .*constraints = .*0.02"):
        constrained(0.3)[0].restore(tmp_path)
    with pytest.raises(ow.OwnerwiseError, match=r"temperature = 1.*but this step has 2"):
        constrained(0.02, temperature=2.0)[0].restore(tmp_path)
    again = constrained(0.02)[0]
    again.restore(tmp_path)
    assert again.release.state() == step.release.state()


def test_the_state_of_other_steering_is_refused(tmp_path):
    steered(acceptance=0.4).save(tmp_path)
    with pytest.raises(ow.OwnerwiseError) as caught:
        steered(acceptance=0.5, gain=0.1).restore(tmp_path)
    assert "the steering in" in str(caught.value)
    assert "acceptance = 0.4, but this step has 0.5" in str(caught.value)
    assert "gain = 0.2, but this step has 0.1" in str(caught.value)
    steered(acceptance=0.4).restore(tmp_path)


def test_a_checkpoint_without_settings_is_loaded(tmp_path, monkeypatch):
    """Earlier ones contain only the states."""
    write = checkpoint_file.write

    def without(folder, updates, header, tensors):
        del header["plug_settings"]
        return write(folder, updates, header, tensors)

    monkeypatch.setattr("ownerwise.step.checkpoints.write", without)
    steered(acceptance=0.4).save(tmp_path)
    steered(acceptance=0.4).restore(tmp_path)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"accepted_share": 0.5},
        {"accepted_share": 0.5, "log_clip_scale": 0.0, "more": 1},
        {"accepted_share": float("nan"), "log_clip_scale": 0.0},
        {"accepted_share": 1.5, "log_clip_scale": 0.0},
        {"accepted_share": "0.5", "log_clip_scale": 0.0},
        {"accepted_share": True, "log_clip_scale": 0.0},
        {"accepted_share": 0.5, "log_clip_scale": 11.0},
        {"accepted_share": 0.5, "log_clip_scale": None},
    ],
)
def test_steering_refuses_a_damaged_or_foreign_state(state):
    steering = AcceptanceSteering(100, 40, 0.4, 0.2)
    before = steering.state()
    with pytest.raises(ow.OwnerwiseError, match="the stored state of the steering has"):
        steering.load_state(state)
    assert steering.state() == before


def test_steering_without_a_target_for_the_clip_norms_refuses_one_that_moved():
    with pytest.raises(ow.OwnerwiseError, match="expected a number from"):
        AcceptanceSteering(100, 40, None, 0.2).load_state(
            {"accepted_share": 0.5, "log_clip_scale": 1.0}
        )
