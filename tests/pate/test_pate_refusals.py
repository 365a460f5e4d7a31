"""What PATE refuses: a second release from one plan, counts of other votes, mixed-up teachers."""

import contextlib
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import ownerwise as ow
from ownerwise.pate import answering
from ownerwise.step import account, read_account

OWNERS = ow.Owners(None, np.repeat([1.0, 4.0], 100), 1e-5)


def make(**changes):
    return ow.pate.plan(
        OWNERS, **{"questions": 20, "answers": 20, "teachers": 10, "threshold": None, **changes}
    )


def counts_of(plan, classes=2):
    return ow.pate.weighted_counts(plan, np.zeros((10, 20), dtype=np.int64), classes)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e30])
def test_a_teacher_without_records_is_moved_by_nobody(value):
    """Whatever record is at position 0, it is not with the empty teacher."""
    torch.manual_seed(0)
    X, y = torch.randn(6, 3), torch.randint(0, 2, (6,))
    held = [np.array([1, 2, 3]), np.array([], dtype=np.int64), np.array([0, 4, 5])]

    def train(inputs):
        return ow.pate.train_teachers(lambda: nn.Linear(3, 2), inputs, y, held, steps=3, lr=0.1)

    other = X.clone()
    other[0] = value
    before, after = train(X), train(other)
    untrained = ow.pate.train_teachers(lambda: nn.Linear(3, 2), X, y, held, steps=0)
    for name, values in before._parameters.items():
        assert torch.equal(values[0], after._parameters[name][0])
        assert torch.equal(values[1], after._parameters[name][1])
        assert torch.equal(values[1], untrained._parameters[name][1])


def test_a_plan_pays_for_one_release():
    """Questions in two parts, or a second try, would spend every budget again."""
    plan = make(questions=21, answers=21)  # no other test has this plan
    counts = counts_of(plan)
    ow.pate.answer(plan, counts, ow.SecretStream.from_seed(0))  # NOT PRIVATE, so it counts nothing
    ow.pate.answer(plan, counts[:10])
    for again in (plan, make(questions=21, answers=21)):
        with pytest.raises(ow.OwnerwiseError, match="epsilons would add up"):
            ow.pate.answer(again, counts[10:])
    ow.pate.answer(plan, counts[10:], ow.SecretStream.from_seed(0))


def test_of_two_threads_at_once_one_releases(monkeypatch):
    """Both look before either is counted, unless they wait for each other."""
    plan, answered = make(questions=44, answers=44), []
    both_looked = threading.Barrier(2)

    class Slow(set):
        def __contains__(self, paid):
            found = super().__contains__(paid)
            with contextlib.suppress(threading.BrokenBarrierError):
                both_looked.wait(timeout=0.2)
            return found

    def work():
        with contextlib.suppress(ow.OwnerwiseError):
            answered.append(ow.pate.answer(plan, counts_of(plan)))

    monkeypatch.setattr(answering, "_released", Slow())
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answered) == 1


def test_no_question_spends_nothing(tmp_path):
    plan = make(questions=45, answers=45)
    labels = ow.pate.answer(plan, counts_of(plan)[:0], folder=tmp_path)
    assert labels.dtype == np.int64
    assert len(labels) == 0
    assert read_account(tmp_path) is None
    assert len(ow.pate.answer(plan, counts_of(plan), folder=tmp_path)) == 20


@pytest.mark.parametrize("steps", [0, 2])
def test_of_a_training_run_and_a_release_one_has_the_folder(steps, tmp_path):
    """A run that has spent nothing loses the folder, and can take no step on its account."""
    data = torch.randn(200, 3), torch.zeros(200, dtype=torch.long)
    plan, model = ow.plan(OWNERS, steps=4, batch_size=20), nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stream = ow.SecretStream()
    step = ow.PrivateStep(model, plan, optimizer, nn.functional.cross_entropy, stream=stream)
    batches = iter(ow.PoissonBatches(data, plan, stream=stream))
    for _ in range(steps):
        step(next(batches))
    step.save(tmp_path)
    asked = make(questions=41 + steps, answers=41 + steps)
    if steps == 0:
        ow.pate.answer(asked, counts_of(asked), folder=tmp_path)
        with pytest.raises(ow.OwnerwiseError, match="only one may train a run"):
            step(next(batches))
        assert read_account(tmp_path).plan == asked.hash
        return
    before = read_account(tmp_path)
    with pytest.raises(ow.OwnerwiseError, match="is spent"):
        ow.pate.answer(asked, counts_of(asked), folder=tmp_path)
    assert read_account(tmp_path) == before
    step(next(batches))
    assert len(ow.pate.answer(asked, counts_of(asked))) == 20  # nothing was charged


def test_a_folder_pays_for_one_release_in_any_process(tmp_path, monkeypatch):
    plan = make(questions=23, answers=23)
    ow.pate.answer(plan, counts_of(plan), folder=tmp_path / "pate")
    monkeypatch.setattr(answering, "_released", set())  # what another process knows
    for again in (plan, make(questions=24, answers=24)):
        with pytest.raises(ow.OwnerwiseError, match=r"is spent.*own folder"):
            ow.pate.answer(again, counts_of(plan)[:5], folder=tmp_path / "pate")
    seeded = ow.SecretStream.from_seed(0)
    with pytest.raises(ow.OwnerwiseError, match="is spent"):
        ow.pate.answer(plan, counts_of(plan), seeded, folder=tmp_path / "pate")
    balance = read_account(tmp_path / "pate")
    assert (balance.plan, balance.spent, balance.planned) == (plan.hash, 1, 1)
    assert balance.private


def test_of_two_processes_at_once_one_releases(tmp_path, monkeypatch):
    """Both have looked at the account before either writes to it."""
    monkeypatch.setattr(answering, "read_account", lambda folder: None)
    plan = make(questions=25, answers=25)
    ow.pate.answer(plan, counts_of(plan), folder=tmp_path)
    monkeypatch.setattr(answering, "_released", set())
    with pytest.raises(ow.OwnerwiseError, match="1 spent step"):
        ow.pate.answer(plan, counts_of(plan), folder=tmp_path)


def test_a_release_is_counted_before_its_noise_is_drawn(tmp_path, monkeypatch):
    def no_noise(*_, **__):
        raise KeyboardInterrupt

    plan = make(questions=26, answers=26)
    with monkeypatch.context() as patched:
        patched.setattr(answering.Noise, "gaussian", no_noise)
        with pytest.raises(KeyboardInterrupt):
            ow.pate.answer(plan, counts_of(plan), folder=tmp_path)
    assert read_account(tmp_path).spent == 1
    monkeypatch.setattr(answering, "_released", set())
    with pytest.raises(ow.OwnerwiseError, match="is spent"):
        ow.pate.answer(plan, counts_of(plan), folder=tmp_path)


def test_a_release_that_cannot_be_counted_is_not_made(tmp_path):
    plan = make(questions=27, answers=27)
    (tmp_path / "file").write_text("")
    with pytest.raises((ow.OwnerwiseError, OSError)):
        ow.pate.answer(plan, counts_of(plan), folder=tmp_path / "file")
    with pytest.raises(ow.OwnerwiseError, match="multiples"):
        ow.pate.answer(plan, counts_of(plan) + plan.grid / 3, folder=tmp_path / "pate")
    assert read_account(tmp_path / "pate") is None
    ow.pate.answer(plan, counts_of(plan), folder=tmp_path / "pate")  # nothing was spent before


@pytest.mark.parametrize("kind", [torch.tensor, np.longdouble, ">f8", "list"])
def test_counts_in_another_form_are_answered(kind, tmp_path):
    """They must not fail after the release is charged, when it cannot be repeated."""
    plan = make(questions=29, answers=29)
    counts = counts_of(plan)
    seeded = [ow.SecretStream.from_seed(0) for _ in range(2)]
    other = (
        counts.tolist()
        if kind == "list"
        else kind(counts)
        if kind is torch.tensor
        else counts.astype(kind)
    )
    given = ow.pate.answer(plan, other, seeded[0], folder=tmp_path)
    assert (given == ow.pate.answer(plan, counts, seeded[1])).all()


def test_a_stream_that_was_used_before_spends_nothing(tmp_path):
    """Its noise would be that of the first release, so no answers can be given."""
    first, second = make(questions=30, answers=30), make(questions=31, answers=31)
    stream = ow.SecretStream()
    ow.pate.answer(first, counts_of(first), stream)
    with pytest.raises(RuntimeError, match="already in use"):
        ow.pate.answer(second, counts_of(second), stream, folder=tmp_path)
    assert read_account(tmp_path) is None
    ow.pate.answer(second, counts_of(second), folder=tmp_path)


def test_killed_between_any_two_writes_it_never_draws_noise_uncounted(tmp_path, monkeypatch):
    """SQLite's statements end one by one in a crash; what follows is what a new process finds."""

    class Crash(BaseException):
        pass

    class Statements:
        """A connection that dies before its statement `last`, and rolls back nothing."""

        in_transaction = False

        def __init__(self, connection, last):
            self.connection, self.last = connection, last

        def execute(self, *arguments):
            self.last -= 1
            if self.last < 0:
                self.connection.close()
                raise Crash
            return self.connection.execute(*arguments)

        def close(self):
            self.connection.close()

    plan, connect, drawn = make(questions=32, answers=32), account.connect, []
    gaussian = answering.Noise.gaussian
    monkeypatch.setattr(
        answering.Noise, "gaussian", lambda *a, **k: drawn.append(1) or gaussian(*a, **k)
    )
    crashes = 0
    for last in range(40):
        drawn.clear()
        folder = tmp_path / str(last)
        monkeypatch.setattr(answering, "_released", set())
        with monkeypatch.context() as patched:
            patched.setattr(
                account,
                "connect",
                lambda path, mode, last=last: Statements(connect(path, mode), last),
            )
            try:
                ow.pate.answer(plan, counts_of(plan), folder=folder)
            except Crash:
                crashes += 1
        monkeypatch.setattr(answering, "_released", set())
        assert (read_account(folder) is None) == (not drawn)
        if drawn:
            break
    assert crashes > 8


def test_answers_with_a_fixed_seed_are_counted_as_not_private(tmp_path):
    plan = make(questions=28, answers=28)
    ow.pate.answer(plan, counts_of(plan), ow.SecretStream.from_seed(0), folder=tmp_path)
    assert read_account(tmp_path).private is False


def test_refused_counts_spend_nothing():
    plan = make(questions=22, answers=22)
    with pytest.raises(ow.OwnerwiseError, match="multiples"):
        ow.pate.answer(plan, counts_of(plan) + plan.grid / 3)
    ow.pate.answer(plan, counts_of(plan))


def test_counts_that_this_plan_does_not_pay_for_are_refused():
    """One vote of weight w each: counts of other weights have another sensitivity."""
    plan = make()
    counts = counts_of(plan)
    moved = counts.copy()
    moved[3] = [counts[3, 0] + 1.0, -1.0]
    for wrong in (counts * 1024, counts * 0, moved):
        with pytest.raises(ow.OwnerwiseError, match="weighted_counts"):
            ow.pate.answer(plan, wrong, ow.SecretStream.from_seed(0))


@pytest.mark.parametrize("vote", [-1, 2, 300])
def test_votes_for_no_class_are_refused(vote):
    votes = np.zeros((10, 20), dtype=np.int64)
    votes[4, 7] = vote
    with pytest.raises(ow.OwnerwiseError, match="expected classes from 0 to 1"):
        ow.pate.weighted_counts(make(), votes, 2)


def test_more_than_256_classes_are_told_apart():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.arange(300.0))

        def forward(self, x):
            return self.bias + 0 * x.sum(1, keepdim=True)

    X, y = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
    teachers = ow.pate.train_teachers(Last, X, y, [np.arange(4)] * 2, steps=0)
    assert (teachers.votes(X) == 299).all()


def test_a_plan_whose_teachers_are_shared_by_classes_of_other_weights_is_refused():
    """Owners pay for the weight of their class, so its teachers must have that weight."""
    plan = make()
    wrong = {
        "another weight": {"first": np.zeros(2, dtype=np.int64), "count": np.array([10, 10])},
        "teachers per record": {"copies": np.array([1, 11])},
        "whole numbers": {"questions": 20.5},
        "unit": {"unit": "person"},
        "noise": {"test_std": 0.0, "threshold": 5.0},
    }
    for message, changes in wrong.items():
        with pytest.raises(ow.PlanError, match=message):
            replace(plan, **changes).verify()
    for changes in ({"copies": np.zeros(2)}, {"copies": np.full(2, -1)}, {"count": np.zeros(2)}):
        with pytest.raises(ow.PlanError, match="teachers per record"):
            replace(plan, **changes).verify()


def test_records_of_owners_with_other_deltas_are_refused():
    plan = make()
    index = np.arange(200)
    strict = ow.Owners(index, dict(zip(index.tolist(), OWNERS.epsilon.tolist(), strict=True)), 1e-9)
    with pytest.raises(ow.OwnerwiseError, match="other budgets"):
        ow.pate.shards_of(plan, strict, index.tolist())


def test_only_the_first_of_several_processes_releases(monkeypatch):
    """Each would draw its own noise, and every owner would pay once for each process."""
    plan = make()
    counts, column = counts_of(plan), np.ones(3)
    for name, value in {"TORCHELASTIC_RUN_ID": "run", "WORLD_SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    seeded = ow.SecretStream.from_seed(0)
    for release, again in (
        (lambda: ow.pate.answer(plan, counts), lambda: ow.pate.answer(plan, counts, seeded)),
        (
            lambda: ow.ino_sum(column, column, column, 1.0, 1.0),
            lambda: ow.ino_sum(column, column, column, 1.0, 1.0, stream=seeded),
        ),
    ):
        with pytest.raises(ow.OwnerwiseError, match="in several processes: each of them would"):
            release()
        again()  # not private: the same numbers in all of them
        monkeypatch.setenv("RANK", "0")
        release()
        monkeypatch.setenv("RANK", "1")
