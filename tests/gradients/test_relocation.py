"""Records that are put in another order, or selected, by what the data say.

With a layout kept from a batch in which all records were in order or equally long, a tape clipped a
record's gradient together with other records'.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from ownerwise.gradients import Refused, Tape
from ownerwise.gradients.observation import _parts
from tools.record_loop import Model, assert_equal, assert_matches_loop, loop, run, wavy

TIME, WIDTH = 4, 3


def lengths_of(x):
    """The first column holds each record's length."""
    return x[:, 0, 0].long()


def there(x):
    return torch.arange(TIME) < lengths_of(x)[:, None]


def by_mask(m, x):
    hidden = torch.zeros_like(x)
    hidden[there(x)] = m.layer(x[there(x)]).tanh()
    return m.last(hidden.sum(1))


def by_numbers(m, x):
    records, times = there(x).nonzero(as_tuple=True)
    hidden = m.layer(x[records, times]).tanh()
    return m.last(torch.zeros(len(x), WIDTH).index_add(0, records, hidden))


def one_by_one(m, x):
    """Selected with numbers that Python took from the data."""
    rows = [record[: int(n)] for record, n in zip(x, lengths_of(x), strict=True)]
    hidden = m.layer(torch.cat(rows)).tanh().split([len(row) for row in rows])
    return m.last(torch.stack([part.sum(0) for part in hidden]))


def in_order(m, x):
    order = lengths_of(x).argsort(descending=True, stable=True)
    return m.last(m.layer(x[order].sum(1)).tanh())[order.argsort()]


def in_order_by_python(m, x):
    order = sorted(range(len(x)), key=lengths_of(x).tolist().__getitem__)
    hidden = m.layer(torch.stack([x[i].sum(0) for i in order])).tanh()
    return m.last(torch.stack([hidden[order.index(i)] for i in range(len(x))]))


def packed_by_hand(m, x):
    lengths, order = lengths_of(x).sort(descending=True, stable=True)
    _, states = m.rnn(pack_padded_sequence(x[order], lengths, batch_first=True))
    return m.last(states[0][order.argsort()])


def layer_on_packed(m, x):
    packed = pack_padded_sequence(x, lengths_of(x), batch_first=True, enforce_sorted=False)
    hidden = m.layer(packed.data).tanh()
    return m.last(m.rnn(PackedSequence(hidden, *packed[1:]))[1][0])


MOVING = [
    *(by_mask, by_numbers, one_by_one, in_order, in_order_by_python, packed_by_hand),
    layer_on_packed,
]


def model_of(forward):
    return Model(
        forward,
        layer=nn.Linear(WIDTH, WIDTH),
        last=nn.Linear(WIDTH, 2),
        rnn=nn.GRU(WIDTH, WIDTH, batch_first=True),
    )


def records_of(lengths):
    x = torch.randn(len(lengths), TIME, WIDTH)
    x[:, 0, 0] = torch.tensor(lengths)
    return x


@pytest.mark.parametrize("forward", MOVING)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_kept_layout_does_not_outlive_the_order_of_the_records(forward, count):
    model, refusals = model_of(forward), 0
    for seed in range(8):
        tape = Tape(model)
        for lengths in ([2] * count, torch.randint(1, TIME + 1, (count,)).tolist()):
            torch.manual_seed(seed)
            x = records_of(lengths)
            try:
                found = run(tape, x)
            except Refused:
                assert lengths != [2] * count or forward is one_by_one
                refusals += 1
                break
            assert_equal(found, loop(model, x))
    assert refusals


def last_entries(m, x):
    return m.last(m.layer(x).tanh()[torch.arange(len(x)), lengths_of(x) - 1])


def gathered(m, x):
    index = (lengths_of(x) - 1)[:, None, None].expand(-1, 1, WIDTH)
    return m.last(m.layer(x).tanh().gather(1, index)[:, 0])


def packed_by_torch(m, x):
    packed = pack_padded_sequence(x, lengths_of(x), batch_first=True, enforce_sorted=False)
    return m.last(m.rnn(packed)[1][0])


def largest(m, x):
    return m.last(m.layer(x).topk(2, dim=1).values.sum(1))


@pytest.mark.parametrize("forward", [last_entries, gathered, packed_by_torch, largest])
def test_a_selection_within_records_is_exact_in_every_batch(forward):
    model = model_of(forward)
    tape = Tape(model)
    for count in (3, 2, 40, 3, 40, 1):
        x = records_of(torch.randint(1, TIME + 1, (count,)).tolist())
        assert_equal(run(tape, x), loop(model, x))


def test_a_selection_in_single_precision_is_confirmed():
    """Powers of two change no rounding: the layouts are not observed again."""
    model = model_of(last_entries).float()
    tape = Tape(model)
    for expected in (7 + 1, 2 + 1):  # layouts observed or confirmed, then used
        passes = []
        x = records_of(torch.randint(1, TIME + 1, (30,)).tolist()).float()
        with tape:
            outputs = model(x)
        outputs.register_hook(passes.append)
        tape.backward(outputs.sin().sum(dim=1))
        assert len(passes) == expected


def test_a_few_entries_of_another_record_are_noticed_at_once():
    """Two of three records were once told apart from the third, but not from each other."""

    def forward(m, ids):
        rows = torch.arange(len(ids)).repeat_interleave(ids[:, -1])
        entries = m.weight[torch.cat([row[: int(row[-1])] for row in ids])]
        return torch.zeros(len(ids)).index_add(0, rows, entries)

    model = Model(forward, weight=torch.randn(9))
    for lengths in ([2, 0, 1], [0, 2, 1], [1, 0, 2], [0, 1, 2], [3, 0, 0]):
        ids = torch.arange(12).reshape(3, 4) % 9
        ids[:, -1] = torch.tensor(lengths)
        with pytest.raises(Refused):
            run(Tape(model), ids)


@pytest.mark.parametrize("count", [2, 3, 4, 7, 32, 70, 300])
def test_parts_separate_every_two_records(count):
    masks = torch.stack(list(_parts(count))).double()
    apart = masks.T @ (1 - masks)  # in how many masks is one record, but not the other?
    assert (apart + torch.eye(count) > 0).all()
    assert len(masks) <= count.bit_length() + 4


@pytest.mark.parametrize("start", [0, 1])
def test_embedding_by_data_is_not_slowed_down(start):
    """An index into a parameter moves no records."""
    model = Model(lambda m, x: m.weight[x[:, start:]].sum(1), weight=torch.randn(5, 2))
    assert_matches_loop(model, torch.randint(0, 5, (4, 3)))
    tape = Tape(model)
    with tape:
        model(torch.randint(0, 5, (4, 3)))
        assert tape._pass is not None
        assert not tape._pass.relocations.by_data


@pytest.mark.parametrize("named", [False, True])
def test_data_as_a_table(named):
    """Rows of the batch, looked up by its own numbers."""

    def forward(m, x):
        order = x[:, 0].argsort(stable=True)
        rows = functional.embedding(order, weight=x) if named else functional.embedding(order, x)
        return m.layer(rows).index_select(0, order.argsort())

    model = Model(forward, layer=nn.Linear(3, 2))
    tape = Tape(model)
    run(tape, torch.arange(12.0).reshape(4, 3))
    with pytest.raises(Refused, match="told apart"):
        run(tape, -torch.arange(12.0).reshape(4, 3))


def every_other(m, x):
    """Numbers from the data decide which rows of the batch a constant index selects."""
    step = int(x[0, 0, 0])
    return m.last(m.layer(x).flatten(0, 1)[torch.arange(0, step * len(x), step)].tanh())


def swapped(m, x):
    """The order of the records, decided by a number from the data."""
    order = torch.arange(len(x)) if x[0, 0, 0] > 2 else torch.arange(len(x) - 1, -1, -1)
    return m.last(m.layer(x.sum(1)).tanh().index_select(dim=0, index=order))


@pytest.mark.parametrize("forward", [every_other, swapped])
@pytest.mark.parametrize("order", [(TIME, 1), (TIME, TIME, 1, TIME)])
def test_a_constant_index_that_moves_records_is_noticed(forward, order):
    model = model_of(forward)
    tape = Tape(model)
    for first in order:
        x = records_of([first] * 3)
        if first == 1:  # all rows belong to the first record, or the records change places
            with pytest.raises(Refused):
                run(tape, x)
        else:
            assert_equal(run(tape, x), loop(model, x))


def test_constant_indices_in_order_select_by_their_shapes():
    """Records x times or times x records: without the shapes, one layout was kept for both."""

    def forward(m, x):
        rows, times = torch.arange(len(x)), torch.arange(TIME)
        if turned:
            return m.last(m.layer(x[rows[None], times[:, None]]).tanh().sum(0))
        return m.last(m.layer(x[rows[:, None], times]).tanh().sum(1))

    model = model_of(forward)
    tape = Tape(model)
    for turned in (False, True, False):  # noqa: B007
        x = records_of([2] * TIME)
        assert_equal(run(tape, x), loop(model, x))


def test_a_constant_index_in_order_is_not_slowed_down():
    """Such indices make the attention masks of the transformers library."""

    def forward(m, x):
        rows, times = torch.arange(len(x))[:, None], torch.arange(TIME)
        kept = x[rows, times].index_select(1, times)
        return m.last(m.layer(kept).tanh().sum(1))

    model = model_of(forward)
    tape = Tape(model)
    # observed once, and confirmed in a larger batch
    for count, expected in ((3, 3 + 1), (3, 1), (5, 2 + 1), (4, 1), (5, 1), (2, 1)):
        passes = []
        x = records_of([2] * count)
        with tape:
            outputs = model(x)
        outputs.register_hook(passes.append)
        assert_equal(tape.backward(wavy(outputs)), loop(model, x))
        assert len(passes) == expected


def time_first(m, x):
    rows = x.transpose(0, 1).flatten(0, 1)
    return m.layer(rows).unflatten(0, (TIME, len(x))).transpose(0, 1)


def time_first_by_property(m, x):
    rows = torch.stack(x.unbind(1)).flatten(0, 1)
    return m.layer(rows).unflatten(0, (TIME, len(x))).permute([1, 0, 2])


def time_first_by_einsum(m, x):
    rows = torch.einsum("bti->tbi", x).flatten(0, 1)
    return torch.einsum("tbi->bti", m.layer(rows).unflatten(0, (TIME, len(x))))


def time_first_by_join(m, x):
    rows = torch.cat([x[:, i : i + 1] for i in range(TIME)], 1).mT.movedim(2, 0)
    return m.layer(rows.flatten(0, 1)).unflatten(0, (TIME, len(x))).movedim(0, 1)


def backwards(m, x):
    return m.layer(x.flip(0).flatten(0, 1)).unflatten(0, x.shape[:2]).flip(0)


def records_first(m, x):
    return m.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def copied(m, x):
    both = x[:, 0].repeat(2, 1)
    return m.layer(both).unflatten(0, (2, len(x))).transpose(0, 1)


def repeated(m, x):
    return m.layer(x[:, 0].repeat_interleave(2, 0)).unflatten(0, (len(x), 2))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    "ways",
    [
        (records_first, time_first),
        (records_first, time_first_by_property),
        (records_first, time_first_by_einsum),
        (records_first, time_first_by_join),
        (records_first, backwards),
        (copied, repeated),
    ],
    ids=lambda ways: ways[1].__name__,
)
def test_a_model_that_chooses_between_two_orders_is_exact_or_refused(ways, turned):
    """In Python, by what the data say: both orders give the same outputs, so no check of them can
    tell, and a layout kept from one would mix the records of the other."""
    ways = ways[::-1] if turned else ways

    def forward(m, x):
        return m.last(ways[bool(x.mean() > 0)](m, x).tanh().mean(1))

    model = model_of(forward)
    tape = Tape(model)
    for sign in (-1, 1, 1, -1):
        x = torch.randn(5, TIME, WIDTH)
        x = x - x.mean() + sign
        try:
            found = run(tape, x)
        except Refused:
            assert backwards in ways
        else:
            assert_equal(found, loop(model, x))


def test_a_model_that_mixes_only_large_batches_is_refused():
    """A known layout is confirmed in every batch that is larger than those before."""

    def forward(m, x):
        hidden = m.layer(x.mean(1)).tanh()
        return m.last(hidden.cumsum(0) if len(x) > 4 else hidden)

    model = model_of(forward)
    tape = Tape(model)
    for count in (3, 4):
        x = torch.randn(count, TIME, WIDTH)
        assert_equal(run(tape, x), loop(model, x))
    with pytest.raises(Refused, match="told apart"):
        run(tape, torch.randn(5, TIME, WIDTH))


@pytest.mark.parametrize("count", [3, 5])
def test_what_a_tape_has_learned_is_confirmed_on_its_own_losses(count):
    """Another tape has observed losses of one output only, of which no other record is part."""

    def forward(m, x):
        hidden = m.layer(x.mean(1)).tanh()
        return torch.cat([m.last(hidden), hidden.roll(1, 0)], 1)

    model = model_of(forward)
    tape, other = Tape(model), Tape(model)
    x = torch.randn(5, TIME, WIDTH)
    with other:
        outputs = model(x)
    other.backward(outputs[:, 0])
    tape.learn(other)
    with tape:
        outputs = model(x[:count])
    with pytest.raises(Refused, match="told apart"):
        tape.backward(wavy(outputs))


@pytest.mark.parametrize("dim", [0, 1])
def test_a_choice_of_the_dimension_to_join_is_exact(dim):
    """Steps of time one by one, joined along time or along records."""

    def forward(m, x):
        first = int(x.mean() > 0) == dim
        parts = [x[:, i] for i in range(TIME)]
        rows = (torch.stack(parts, 1) if first else torch.cat(parts)).reshape(-1, WIDTH)
        hidden = m.layer(rows).tanh()
        hidden = hidden.view(len(x), TIME, -1).mean(1) if first else sum(hidden.chunk(TIME)) / TIME
        return m.last(hidden)

    model = model_of(forward)
    tape = Tape(model)
    for sign in (-1, 1, -1):
        x = torch.randn(5, TIME, WIDTH)
        x = x - x.mean() + sign
        assert_equal(run(tape, x), loop(model, x))
