"""The papers' networks: their sizes, and the rules that every network must keep."""

import pytest
import torch
from torch import nn

from ownerwise import models
from ownerwise_reproduction.models import ImdbLSTM, cifar_cnn, surnames_lstm
from tools import network_tools as rules
from tools import step_tools as tools

_thread = pytest.fixture(autouse=True)(tools.one_thread)

CLASSES = {"cifar-cnn": 10, "surnames-lstm": 18, "imdb-lstm": 2}

# layer by layer
PARAMETERS = {
    "cifar-cnn": 550_570,
    "surnames-lstm": 59 * 64 + 512 * (64 + 128 + 2) + 129 * 18,
    "imdb-lstm": 20_000 * 100 + 101 * 32 + 2 * 128 * (32 + 32 + 2) + 65 * 16 + 17 * 2,
}


def records(name: str, count: int) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(count, 3, 32, 32) if name == "cifar-cnn" else rules.tokens(count)


@pytest.mark.parametrize("name", PARAMETERS)
def test_size_and_outputs(name):
    model = models.build(name)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    with torch.no_grad():
        outputs = model(records(name, 3))
    assert outputs.shape == (3, CLASSES[name])
    assert outputs.isfinite().all()


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_private_step_trains_it(name):
    model = models.build(name, **({"words": 200} if name == "imdb-lstm" else {}))
    rules.assert_the_private_step_trains(model, records(name, 4), CLASSES[name])


def test_a_hundred_classes():
    model = cifar_cnn(classes=100)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS["cifar-cnn"] + 129 * 90
    assert model(records("cifar-cnn", 2)).shape == (2, 100)


def test_padding_changes_neither_outputs_nor_gradients():
    """Pitfall 33."""
    torch.manual_seed(0)
    rules.assert_padding_has_no_effect(ImdbLSTM())


def test_an_empty_text_has_a_finite_output():
    assert ImdbLSTM()(torch.zeros(2, 5, dtype=torch.int64)).isfinite().all()


def test_tanh_and_the_tempered_sigmoid_make_the_same_network():
    rules.assert_tempered_sigmoids_generalise_tanh(cifar_cnn, records("cifar-cnn", 2))


def test_the_private_step_trains_tempered_sigmoids():
    torch.manual_seed(0)
    model = ImdbLSTM(words=200, activation=rules.TEMPERED)
    rules.assert_sums_are_those_of_the_loop(model, records("imdb-lstm", 6), 2)


def test_the_networks_are_registered_by_name():
    found = {name: models.BUILDERS[name] for name in ("cifar-cnn", "surnames-lstm", "imdb-lstm")}
    assert found == {"cifar-cnn": cifar_cnn, "surnames-lstm": surnames_lstm, "imdb-lstm": ImdbLSTM}


def test_the_reviews_are_read_in_both_directions():
    """Equal to a two-way LSTM with the same weights, where nothing is padded."""
    torch.manual_seed(0)
    model = ImdbLSTM(words=30).double()
    two_way = nn.LSTM(32, 32, batch_first=True, bidirectional=True).double()
    halves = {"": model.forwards, "_reverse": model.backwards}
    state = {f"{k}{end}": v for end, half in halves.items() for k, v in half.state_dict().items()}
    two_way.load_state_dict(state)
    tokens = torch.randint(1, 30, (3, 6))
    states = two_way(model.project(model.embedding(tokens)))[0]
    torch.testing.assert_close(model(tokens), model.head(states.mean(dim=1)), rtol=0, atol=1e-12)
