"""A mark "not private" must not get lost when data or modules are handed on.

The attack: compute something from private records without noise, hand the result over as plain
tensors or inside a model, and publish a card that says "Private.".
"""

import copy
import gc
import pickle

import numpy as np
import pytest
import torch
from sklearn.frozen import FrozenEstimator
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

import ownerwise as ow
from ownerwise import marks
from ownerwise.data import DataSet, Records, load_table
from ownerwise.errors import OwnerwiseError, PrivacyWarning
from ownerwise.estimators import PrivateClassifier
from ownerwise.marks import mark, marks_of, share_records
from ownerwise.models.features import Frozen
from ownerwise.report.card import card_text
from tools import training_tools as tools

REASON = "components of the records"


class Held(Dataset):
    def __init__(self, inputs, targets):
        self.inputs, self.targets = inputs, targets

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, at):
        return self.inputs[at], self.targets[at]


def fresh():
    return tuple(tensor.clone() for tensor in tools.data())


def private_run(data, model=None, **options):
    return tools.make_trainer(model=model, seed=None).fit(data, **options)


class TestArrays:
    def test_views_keep_the_mark_and_other_memory_has_none(self):
        inputs = mark(np.ones((10, 3)), REASON)
        tensor = torch.from_numpy(inputs)
        for view in (inputs[2:4], inputs.T, tensor, tensor[3:], tensor.view(-1), tensor.numpy()):
            assert marks_of(view) == [REASON]
        assert marks_of(np.ones((10, 3)), tensor.clone(), torch.ones(3)) == []

    def test_a_part_of_an_array(self):
        whole = torch.zeros(10, 3)
        mark(whole[:5], REASON)
        assert marks_of(whole) == marks_of(whole[4:]) == [REASON]
        assert marks_of(whole[5:]) == []

    @pytest.mark.parametrize("make", [lambda: torch.ones(6, 2), lambda: np.ones((6, 2))])
    def test_a_mark_lives_as_long_as_the_memory(self, make):
        before = len(marks._regions)
        array = mark(make(), REASON)
        view = array[2:]
        del array
        gc.collect()
        assert marks_of(view) == [REASON]
        del view
        gc.collect()
        assert len(marks._regions) == before

    def test_datasets_and_tuples(self):
        inputs, targets = mark(torch.ones(6, 2), REASON), torch.zeros(6)
        held = [(inputs, targets), TensorDataset(inputs, targets), Held(inputs.numpy(), targets)]
        held += [Subset(held[1], [0]), ConcatDataset([held[2], held[1]])]
        for data in held:
            assert marks_of(data) == [REASON]

    def test_what_has_no_attributes_is_refused(self):
        with pytest.raises(OwnerwiseError, match="a int cannot be marked"):
            mark(3, REASON)


class TestModules:
    def test_copies_and_wrappers_keep_the_mark(self):
        extractor = mark(nn.Linear(4, 4), REASON)
        mark(extractor, "fitted means")
        model = nn.Sequential(Frozen(extractor), nn.Linear(4, 3))
        for thing in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert marks_of(thing) == [REASON, "fitted means"]

    def test_a_buffer_with_marked_memory(self):
        model = nn.Linear(4, 3)
        model.register_buffer("centre", mark(torch.ones(4), REASON))
        assert marks_of(nn.Sequential(model)) == [REASON]


class TestRuns:
    def test_a_marked_model(self):
        model = tools.make_model()
        mark(model[0], REASON)
        run = private_run(fresh(), model)
        assert run.not_private == [REASON]
        assert "**Private" not in card_text(run)
        assert REASON in card_text(run)

    @pytest.mark.parametrize("as_dataset", [tuple, lambda pair: TensorDataset(*pair)])
    def test_marked_data(self, as_dataset):
        data = fresh()
        mark(data[0], REASON)
        assert private_run(as_dataset(data)).not_private == [REASON]

    def test_data_without_marks_stay_private(self):
        run = private_run(fresh(), **tools.validation())
        assert run.private
        assert "**Private" in card_text(run)

    def test_a_loop_of_ones_own(self):
        data = fresh()
        plan = tools.make_plan()

        def private(model, records):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            step = ow.PrivateStep(model, plan, optimizer, nn.functional.cross_entropy)
            for batch in ow.PoissonBatches(records, plan, steps=1):
                step(batch)
            return step.private

        assert private(tools.make_model(), data)
        assert not private(mark(tools.make_model(), REASON), data)
        mark(data[0], REASON)
        assert not private(tools.make_model(), data)

    def test_a_run_cannot_lose_its_mark_by_being_resumed(self, tmp_path):
        data = fresh()
        mark(data[0], REASON)
        tools.make_trainer(folder=tmp_path, seed=None).fit(data)
        resumed = tools.make_trainer(folder=tmp_path, seed=None)
        with pytest.raises(OwnerwiseError, match="not_private was"):
            resumed.fit(tools.data(), resume=True)
        assert not ow.Run.load(tmp_path).private


class TestLoaders:
    def test_statistics_of_a_table_reach_the_card(self, tmp_path):
        rows = "".join(f"{k % 3},{k},{k % 2}\n" for k in range(90))
        (tmp_path / "t.csv").write_text("who,age,ill\n" + rows)
        options = {"target": "ill", "owner": "who", "classes": [0, 1], "test_share": None}
        with pytest.warns(PrivacyWarning):
            data = load_table(tmp_path / "t.csv", scale="statistics", **options)
        owners = ow.Owners(data.train.columns["owner"], {0: 1.0, 1: 2.0, 2: 8.0}, 1e-5)
        plan = ow.plan(owners, steps=3, batch_size=10)
        run = ow.Trainer(nn.Linear(1, 2), plan, lr=0.1).fit(data.train.tensors())
        assert not run.private
        assert "means and standard deviations" in card_text(run)

    def test_marks_follow_parts_subsets_and_new_data_sets(self):
        make = lambda n: Records(np.ones((n, 2), np.float32), np.arange(n) % 2)  # noqa: E731
        data = DataSet("x", make(8), make(4), ("a", "b"), not_private=(REASON,))
        pieces = [data.train, data.test, data.train.take(np.array([0, 3])), data.only(["b"]).train]
        pieces += [piece.inputs for piece in pieces]
        pieces += [DataSet("y", data.train, None, data.classes), data.train.tensors()]
        for piece in pieces:
            assert marks_of(piece) == [REASON]
        assert marks_of(DataSet("z", make(3), None, ("a", "b"))) == []


class TestPipelines:
    inputs = np.random.default_rng(0).normal(size=(90, 4))
    labels = np.arange(90) % 2

    def fit(self, *steps):
        estimator = PrivateClassifier(3.0, steps=3, classes=[0, 1])
        make_pipeline(*steps, estimator).fit(self.inputs, self.labels)
        return estimator

    def test_a_scaler_that_a_pipeline_fits(self):
        with pytest.warns(PrivacyWarning, match="fitted standardscaler to the records"):
            estimator = self.fit(StandardScaler())
        assert not estimator.private_
        assert "standardscaler, fitted to the records" in card_text(estimator.run_)

    def test_steps_that_learn_nothing_from_the_records(self):
        public = FrozenEstimator(StandardScaler().fit(np.random.default_rng(1).normal(size=(9, 4))))
        steps = FunctionTransformer(np.tanh), SimpleImputer(strategy="constant"), public
        assert self.fit(*steps).private_

    def test_marked_arrays(self):
        marked = mark(self.inputs.astype(np.float64), REASON)
        estimator = PrivateClassifier(3.0, steps=3, classes=[0, 1]).fit(marked, self.labels)
        assert estimator.run_.not_private == [REASON]


class TestValidation:
    @pytest.mark.parametrize("which", [slice(None), slice(0, 45), slice(119, None)])
    @pytest.mark.parametrize("name", ["validation", "test"])
    def test_training_records_as_validation_data(self, which, name):
        data = fresh()
        with pytest.warns(PrivacyWarning, match=f"the {name} data contain training records"):
            run = private_run(data, **{name: tuple(tensor[which] for tensor in data)})
        assert not run.private
        assert f"{name} metrics were computed on training records" in card_text(run)

    def test_other_rows_of_one_tensor_are_other_records(self):
        inputs, targets = torch.randn(240, 4), torch.arange(240) % 3
        data, other = (inputs[:120], targets[:120]), (inputs[120:], targets[120:])
        assert private_run(data, validation=other).private
        assert not share_records((inputs[::2],), (inputs[1::2],))

    def test_subsets_of_one_dataset(self):
        whole = TensorDataset(torch.randn(10, 2), torch.zeros(10))
        nested = Subset(Subset(whole, [5, 6, 7]), [0, 2])
        assert share_records(Subset(whole, [1, 5]), nested)
        assert not share_records(Subset(whole, [1, 6]), nested)
        assert share_records(whole, nested)


class TestAgain:
    def test_a_second_training_on_the_same_owners(self, tmp_path):
        first = private_run(fresh())
        assert "had already trained" not in card_text(first)
        with pytest.warns(PrivacyWarning, match=r"already trained on owners .*\(once\)"):
            second = tools.make_trainer(folder=tmp_path, seed=None).fit(fresh())
        assert second.private
        for run in (second, ow.Run.load(tmp_path)):
            assert "same ids and counts (1 time)" in card_text(run)

    def test_fixed_seeds_and_resumed_runs_do_not_count(self, tmp_path):
        tools.make_trainer().fit(fresh())
        tools.make_trainer(folder=tmp_path, seed=None).fit(fresh())
        run = tools.make_trainer(folder=tmp_path, seed=None).fit(fresh(), resume=True)
        assert "earlier_trainings" not in run.config


class _Holding(Dataset):
    """A Dataset that holds its records in attributes, however its author likes."""

    def __init__(self, **held):
        vars(self).update(held)

    def __len__(self):
        return 20

    def __getitem__(self, at):
        raise NotImplementedError


def _two_tensors():
    return torch.randn(20, 4), torch.arange(20)


HOLDING = {
    "subset": lambda X, y: Subset(TensorDataset(X, y), range(20)),
    "concatenated": lambda X, y: ConcatDataset([Subset(TensorDataset(X, y), range(20))]),
    "list": lambda X, y: _Holding(parts=[X, y]),
    "dict": lambda X, y: _Holding(parts={"x": X, "y": y}),
    "samples": lambda X, y: _Holding(samples=list(zip(X, y, strict=True))),
    "records": lambda X, y: _Holding(records=Records(X.numpy(), y.numpy())),
    "transform": lambda X, y: _Holding(dataset=TensorDataset(X, y)),
}


@pytest.mark.parametrize("how", HOLDING)
def test_training_records_are_noticed_however_a_dataset_holds_them(how):
    X, y = _two_tensors()
    held = HOLDING[how](X, y)
    for other in ((X, y), TensorDataset(X, y), Subset(TensorDataset(X, y), [-1, -20])):
        assert share_records(held, other)
        assert share_records(other, held)
    assert not share_records(held, _two_tensors())


def test_disjoint_rows_are_not_the_same_records():
    X, y = _two_tensors()
    full, again = TensorDataset(X, y), TensorDataset(X, y)
    train = Subset(full, range(10))
    for rest in (Subset(full, range(10, 20)), Subset(again, range(10, 20)), (X[10:], y[10:])):
        assert not share_records(train, rest)
        assert not share_records(_Holding(dataset=train), rest)
    itself = _Holding()
    itself.parent = itself
    assert not share_records(itself, full)


@pytest.mark.parametrize("how", HOLDING)
def test_marks_stay_however_a_dataset_holds_the_array(how):
    X, y = _two_tensors()
    mark(X, "means of the features")
    assert marks_of(HOLDING[how](X, y)) == ["means of the features"]


def test_marks_of_what_a_module_holds_as_plain_attributes():
    model = torch.nn.Linear(2, 2)
    model.before = [mark(torch.nn.Linear(2, 2), "principal components")]
    assert marks_of(model) == ["principal components"]
