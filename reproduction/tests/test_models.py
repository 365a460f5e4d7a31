"""Networks of the papers; `tests/models` holds all registered networks to the same rules."""

import torch
from torch import nn

from ownerwise import models
from ownerwise_reproduction.models import ImdbLSTM, cifar_cnn, surnames_lstm


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
