import html
import re
import sys

import numpy as np
import pytest
import torch

import ownerwise as ow
from ownerwise.report import write_report
from ownerwise.report.comparison import Comparison
from ownerwise.report.overview import overview
from ownerwise.report.page import page
from ownerwise.report.sections import SECTIONS
from ownerwise.runs import Run
from tools.report_tools import made_run, small_plan, two_methods, wide_plan
from tools.step_tools import one_thread

one_thread = pytest.fixture(autouse=True)(one_thread)

HOSTILE = "<script>alert('x')</script>&\"'<b>"


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> str:
    """The report of two methods with three seeds each."""
    return text_of(two_methods(), tmp_path_factory.mktemp("compared"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> str:
    """The report of one private run."""
    return text_of([made_run(seed=None)], tmp_path_factory.mktemp("alone"))


def text_of(runs, tmp_path, **options) -> str:
    write_report(runs, tmp_path / "report.html", **options)
    return (tmp_path / "report.html").read_text(encoding="utf-8")


def body_of(document: str) -> str:
    """The page without plotly, the data and the style."""
    return document.split("<body>")[1].split('<script type="application/json"')[0]


def words_of(markup: str) -> str:
    """The words of a page or of a piece of it, with single spaces."""
    body = body_of(markup) if "<body>" in markup else markup
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def glance_of(*runs: Run) -> str:
    """The overview as HTML."""
    content = overview(Comparison.of(runs))
    return body_of(page("", [(SECTIONS[0], content)], []))


def test_the_same_runs_give_the_same_bytes(tmp_path, compared):
    assert text_of(two_methods(), tmp_path) == compared


def test_plotly_is_embedded_once_and_nothing_is_fetched(compared):
    assert compared.count("plotly.js v") == 1
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', compared)[1]
    assert policy.startswith("default-src 'none';")
    assert "http" not in policy
    assert "unsafe" not in policy.split("script-src")[1]
    assert "connect-src" not in policy  # the default, 'none', holds
    page = compared.split("<body>")[0] + body_of(compared)
    assert not re.search(r"""(src|href)=["'](?!#)""", page)
    assert "url(" not in page


def test_fixed_seeds_are_said_loudly(compared):
    banner = '<div class="banner bad" role="note"><strong>NOT PRIVATE</strong>'
    assert banner in body_of(compared)
    assert "fixed seeds (0, 1, 2)" in words_of(compared)
    assert "banner good" not in body_of(compared)
    one_open = glance_of(made_run(seed=None), made_run("INO-SGD", seed=3))
    assert "1 of 2 runs carries no guarantee" in words_of(one_open)
    kept = glance_of(made_run(seed=None, not_private=["losses of training records were kept"]))
    assert banner in kept
    assert "losses of training records were kept" in words_of(kept)


def test_private_runs_say_what_they_promise_and_that_runs_add_up():
    words = words_of(glance_of(made_run(seed=None), made_run("INO-SGD", seed=None)))
    assert "NOT PRIVATE" not in words
    assert "with its owner's budget: ε 0.5 to 8 per record at δ 1e-5" in words
    assert "No record has spent more than 99.9" in words
    assert "if these 2 runs are all released, records used in several of them spend more" in words
    assert "Not private: these results were measured on validation records" in words


def test_methods_are_tabled_with_the_best_marked_and_losses_told():
    runs = two_methods()
    glance = glance_of(*runs)
    accuracies = [100 * run.history[-1]["validation"]["accuracy"] for run in runs[3:]]
    shown = f"{np.mean(accuracies):.1f} ± {np.std(accuracies, ddof=1):.1f}"
    assert f'aria-label="best mean">★</span>{shown}</td>' in glance
    words = words_of(glance)
    assert "INO-SGD vs IDP-SGD. Gained: overall accuracy +" in words
    assert "Of 3 owners, 2 had a higher and 1 a lower mean recall; the largest fall was −" in words
    assert "points for owner volunteers (ε 8 per record)." in words


def test_what_was_not_gained_is_said():
    equal = [made_run(label, seed=s) for label in ("IDP-SGD", "other way") for s in range(3)]
    words = words_of(glance_of(*equal))
    assert "Nothing gained beyond chance. Unchanged or within chance: over" in words
    worse = words_of(glance_of(made_run(), made_run("INO-SGD", seed=1, lift=-0.5)))
    assert "Worse here: overall accuracy −" in worse
    assert "cannot show how much of a difference is due to chance" in worse


def test_plain_language_of_an_epsilon(alone):
    words = words_of(alone)
    for bound in ("62.3 in 100", "88.1 in 100", "99.97 in 100"):
        assert bound in words
    assert "ONE RECORD, not one owner" in words
    assert "the table of budgets" in words
    assert "The training time and any other side channel" in words


def test_names_are_text_wherever_they_appear(tmp_path):
    budgets = {HOSTILE: 0.5, "{x}%{y}": 2.0, "plain": 8.0}
    owners = ow.Owners(
        np.repeat([HOSTILE, "{x}%{y}", "plain"], [200, 300, 500]), budgets, delta=1e-5
    )
    plan = ow.plan(owners, "sample", steps=50, batch_size=64)
    runs = [
        made_run(label, plan=plan, budgets=budgets, name=HOSTILE, model=HOSTILE, data=HOSTILE,
                 extra={HOSTILE: HOSTILE}, evaluations=3)
        for label in (HOSTILE, "INO-SGD" + HOSTILE)
    ]  # fmt: skip
    document = text_of(runs, tmp_path, title=HOSTILE)
    assert "<script>alert" not in document
    assert "alert('x')" not in body_of(document)
    assert document.count("<script") == 3 + _plotly().count("<script")
    assert html.escape(HOSTILE, quote=True) in document
    assert HOSTILE in words_of(document)


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def test_what_is_left_out_is_said_with_the_reason(tmp_path, alone):
    words = words_of(alone)
    assert "Gain by budget: needs at least two methods" in words
    assert "Importance weights within a batch: no importance weights were used" in words
    bare = words_of(text_of([made_run(seed=None, with_validation=False)], tmp_path))
    assert "it is unknown how well the model works, and for whom" in bare
    assert "Learning curves by group: needs validation groups" in bare


def test_single_owners_are_not_shown_if_there_are_many(tmp_path, alone):
    budgets = {str(i): e for i, e in enumerate(np.geomspace(0.3, 9.0, 60).tolist())}
    plan = wide_plan()
    runs = [made_run(label, plan=plan, budgets=budgets, evaluations=3)
            for label in ("IDP-SGD", "INO-SGD")]  # fmt: skip
    document = text_of(runs, tmp_path)
    assert "By owner" not in document
    assert "Owner 7" not in document
    assert "(8 owners)" in document
    assert "By owner" in alone


def test_what_differs_between_methods_is_set_apart(compared):
    document = body_of(compared)
    differing = document.split("What differs</p>")[1].split("</table>")[0]
    assert "weights: tail" in differing
    assert "optimizer: learning rate" not in differing
    assert "optimizer: learning rate" in document


def test_an_interrupted_run_can_be_reported(tmp_path):
    run = made_run(seed=None, steps_spent=0, evaluations=1)
    words = words_of(text_of([run], tmp_path))
    assert "0 of 200" in words
    empty = Run(run.config, small_plan())
    assert "No validation data" in words_of(text_of([empty], tmp_path))


def test_missing_plotly_is_explained_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ow.OwnerwiseError, match=r"pip install 'ownerwise\[report\]'"):
        write_report([made_run()], tmp_path / "report.html")
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:this process has already trained:ownerwise.PrivacyWarning")
def test_a_real_training_is_reported_from_its_folder(tmp_path):
    from ownerwise.training import (
        Trainer,
    )

    generator = torch.Generator().manual_seed(0)
    plan = small_plan(steps=12)
    inputs = torch.randn(1000, 5, generator=generator)
    labels = (inputs[:, 0] > 0).long()
    groups = plan.owners.ids[plan.owners.record_owner_index]
    runs = []
    for weights in (None, ow.INO()):
        trainer = Trainer(torch.nn.Linear(5, 2), plan, lr=0.5, weights=weights, progress=False,
                          folder=tmp_path / f"run-{len(runs)}", evaluate_every=3)  # fmt: skip
        chosen = slice(None, None, 7)
        trainer.fit(
            (inputs, labels),
            validation=(inputs[chosen].clone(), labels[chosen].clone()),
            validation_groups=groups[chosen],
        )
        runs.append(Run.load(tmp_path / f"run-{len(runs)}"))
    runs[0].report(tmp_path / "report.html", runs[1])
    document = (tmp_path / "report.html").read_text(encoding="utf-8")
    words = words_of(document)
    assert "INO-SGD vs IDP-SGD." in words
    assert "Owner clinic · ε 0.5" in words
    assert "NOT PRIVATE" not in words
    assert "12 of 12" in words


def test_individual_budgets_are_compared_with_the_plainer_method(tmp_path):
    plain = [made_run("DP-SGD", seed=s, plan=small_plan("uniform")) for s in range(3)]
    runs = [made_run("IDP-SGD", seed=s, lift=0.5) for s in range(3)]
    weighted = [made_run("INO-SGD", seed=s, lift=0.6, weights={"kind": "INO"}) for s in range(3)]
    words = words_of(text_of(plain + runs + weighted, tmp_path))
    assert words.index("IDP-SGD vs DP-SGD.") < words.index("INO-SGD vs IDP-SGD.")
    assert "DP-SGD vs IDP-SGD. " not in words.replace("INO-SGD vs", "")


_INTERNAL = re.compile(
    r"\b(?:float|int|uint)\d+\b|\btorch\.|<class|object at 0x|\bNone\b|\bndarray\b"
    r"|\bTrue\b|\bFalse\b|\[\]|\{\}|\['|\bdict\(|\bnan\b|\binf\b|dtype"
)


@pytest.mark.filterwarnings("ignore:this process has already trained:ownerwise.PrivacyWarning")
@pytest.mark.parametrize("folder", [True, False])
def test_nothing_internal_stands_where_a_person_reads(tmp_path, folder):
    """Dtypes, shapes, Python values and objects; arrays are described in words."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1000, 5, generator=generator)
    labels = (inputs[:, 0] > 0).long()
    held_out = torch.utils.data.TensorDataset(inputs[::3].clone(), labels[::3].clone())
    data = (inputs, labels) if folder else torch.utils.data.TensorDataset(inputs, labels)
    options = {"schedule": lambda step: 1.0, "optimizer": torch.optim.Adam}
    if folder:
        options = {"weights": ow.INO(), "folder": tmp_path / "run"}
    trainer = ow.Trainer(
        torch.nn.Linear(5, 2), small_plan(steps=4), lr=0.01, progress=False, evaluate_every=2,
        **options,
    )  # fmt: skip
    run = trainer.fit(data, validation=held_out)
    words = words_of(text_of([run], tmp_path))
    run.card(tmp_path / "CARD.md")
    card = (tmp_path / "CARD.md").read_text(encoding="utf-8").split("## Check it yourself")
    told = card[0] + card[1].split("## Released")[1]
    assert sorted({*_INTERNAL.findall(words), *_INTERNAL.findall(told)}) == []
    assert "How this was made" in words
    if folder:
        assert "arrays with 5 numbers and one target per record" in words
        assert "Training took 4 steps. Each step draws every record at random" in words
        hashes = words.index(run.plan.hash[:16])
        assert words.index("All settings") < words.index("Hashes") < hashes
