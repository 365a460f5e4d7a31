"""A record's side of a split must not depend on the other records.

The attack: remove one record from a table. If sides go by position or by a permutation, hundreds of
other records change between training and held-out data, and no guarantee for a single record holds.
"""

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

import ownerwise as ow
from ownerwise.config import build
from ownerwise.data import DataSet, Pictures, Records, load_table
from ownerwise.data.splits import content_rows, held_out, hold_out
from ownerwise.owners.tables import parquet_columns

ROWS = 60
DECLARED = {"age": (0, 110), "ward": ["day", "night"]}
WORDS = ("home", "admitted")


def rows(count=ROWS):
    """Rows (key, age, ward, outcome) with names of many lengths, and with gaps."""
    draw = np.random.default_rng(3)
    return [
        ("p" * int(draw.integers(1, 9)) + str(k), "" if k % 7 == 0 else str(draw.integers(110)),
         ("day", "night")[draw.integers(2)], WORDS[draw.integers(2)])
        for k in range(count)
    ]  # fmt: skip


def as_csv(folder, given):
    path = folder / "t.csv"
    path.write_text("key,age,ward,outcome\n" + "".join(",".join(row) + "\n" for row in given))
    return load_table(
        path, target="outcome", classes=WORDS, features=DECLARED, columns=["key"], test_share=0.3
    )


def as_parquet(folder, given):
    keys, ages, wards, outcomes = map(list, zip(*given, strict=True))
    numbers = [int(age) if age else None for age in ages]
    table = pa.table({"key": keys, "age": numbers, "ward": wards, "outcome": outcomes})
    parquet.write_table(table, folder / "t.parquet")
    return load_table(
        folder / "t.parquet",
        target="outcome", classes=WORDS, features=DECLARED, columns=["key"], test_share=0.3,
    )  # fmt: skip


def as_arrays(folder, given):
    inputs = np.array([[len(key), len(age)] for key, age, _, _ in given], dtype=np.float64)
    targets = np.array([WORDS.index(row[3]) for row in given])
    keys = np.array([row[0] for row in given])  # as wide as the longest of them
    np.savez(folder / "t.npz", x=inputs, y=targets, key=keys)
    return load_table(
        folder / "t.npz", target="y", classes=[0, 1], features=["x"], columns=["key"],
        test_share=0.3,
    )  # fmt: skip


def as_pictures(folder, given):
    for key, *_ in given:
        if not (folder / f"{key}.png").exists():
            Image.new("L", (2, 2), len(key)).save(folder / f"{key}.png")
    lines = [f"{key}.png {key} {WORDS.index(outcome)}" for key, _, _, outcome in given]
    path = folder / "attributes.txt"
    path.write_text(f"{len(lines)}\nkey ill\n" + "\n".join(lines) + "\n")
    return load_table(
        path, target="ill", classes=[0, 1], features={"file": Pictures(channels=1)},
        columns=["key"], test_share=0.3,
    )  # fmt: skip


def sides(data):
    """Return {key: part} of every record."""
    return {
        str(key): part
        for part, records in data.parts().items()
        for key in records.columns["key"].tolist()
    }


@pytest.mark.parametrize("load", [as_csv, as_parquet, as_arrays, as_pictures])
def test_no_record_of_a_table_decides_the_side_of_another(load, tmp_path):
    given = rows()
    before = sides(load(tmp_path, given))
    assert set(before.values()) == {"train", "test"}
    for at, row in enumerate(given):
        after = sides(load(tmp_path, given[:at] + given[at + 1 :]))
        assert after == {key: side for key, side in before.items() if key != row[0]}


def test_a_new_record_and_another_order_move_nobody(tmp_path):
    before = sides(as_csv(tmp_path, rows()))
    longest = ("a much longer name than that of anyone else", "3.5", "night", "home")
    after = sides(as_csv(tmp_path, [longest, *reversed(rows())]))
    assert {key: after[key] for key in before} == before


def validation_keys(data, seed=0):
    settings = {"validation_share": 0.3, "validation_seed": seed}
    kept, held, _ = build.split_records(data, settings)
    sides = {int(key): "train" for key in kept.train.columns["key"]}
    return sides | {int(key): "validation" for key in held.columns["key"]}


def numbered(count=1000):
    draw = np.random.default_rng(5)
    inputs = draw.normal(size=(count, 3)).astype(np.float32)
    records = Records(inputs, draw.integers(0, 4, count), {"key": np.arange(count)})
    return DataSet("x", records, None, tuple("abcd"))


def without(data, at):
    kept = np.delete(np.arange(len(data.train)), at)
    return DataSet(data.name, data.train.take(kept), None, data.classes)


def test_no_record_decides_who_is_held_out_for_validation():
    data = numbered()
    before = validation_keys(data)
    held = sum(side == "validation" for side in before.values())
    assert abs(held - 300) < 5 * np.sqrt(1000 * 0.3 * 0.7)  # binomial, not exact
    for at in range(0, 1000, 20):
        after = validation_keys(without(data, at))
        assert after == {key: side for key, side in before.items() if key != at}


def test_the_digits_with_a_validation_share():
    whole = ow.data.load("digits")
    records = Records(whole.train.inputs, whole.train.targets, {"key": np.arange(len(whole.train))})
    data = DataSet("digits", records, None, whole.classes)
    before = validation_keys(data)
    for at in (0, 700, len(records) - 1):
        after = validation_keys(without(data, at))
        assert after == {key: side for key, side in before.items() if key != at}


def test_the_seed_changes_the_split_and_the_two_splits_are_independent():
    rows = content_rows([np.arange(4000)])
    first, second = held_out(rows, 0.3, "validation"), held_out(rows, 0.3, "validation", seed=1)
    other = held_out(rows, 0.3, "test")
    for one, two in ((first, second), (first, other)):
        # 4000 * 0.09 expected in both, standard deviation 18: five of them
        assert abs((one & two).sum() - 360) < 90


def test_sides_depend_on_the_values_and_not_on_how_an_array_holds_them():
    names, numbers = ["a", "bc", "a"], [1, 2, 1]
    forms = [
        [np.array(names), np.array(numbers)],
        [np.array(names, dtype="U40"), np.array(numbers, dtype=np.int32)],
        [np.array(names, dtype=object), np.array(numbers, dtype=object)],
    ]
    assert len({tuple(content_rows(form)) for form in forms}) == 1
    rows = content_rows(forms[0])
    assert rows[0] == rows[2] != rows[1]  # identical records share a side


def test_cells_cannot_run_into_each_other():
    one = content_rows([np.array(["ab"]), np.array(["c"])])
    other = content_rows([np.array(["a"]), np.array(["bc"])])
    assert one != other


def test_whole_groups_go_by_their_id():
    owners = np.repeat(np.arange(300), 7)
    mask = held_out(content_rows([owners]), 0.5, "test")
    by_owner = mask.reshape(300, 7)
    assert (by_owner == by_owner[:, :1]).all()
    assert 100 < by_owner[:, 0].sum() < 200


def test_a_record_that_changes_the_type_of_a_column_moves_nobody():
    numbers = np.arange(50)
    assert content_rows([numbers]) == content_rows([np.append(numbers, 0.5)])[:-1]
    pixels = np.arange(100, dtype=np.uint8).reshape(50, 2)
    for wider in (np.int16, np.int64, np.float32, np.float64):
        assert content_rows([pixels]) == content_rows([pixels.astype(wider)])
    reals = np.random.default_rng(0).normal(size=(50, 2)).astype(np.float32)
    assert content_rows([reals]) == content_rows([reals.astype(np.float64)])


@pytest.mark.parametrize("kind", ["nanoseconds", "time zone", "duration", "list", "int", "text"])
def test_a_gap_in_a_parquet_column_moves_nobody(kind, tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    form, values = {
        "nanoseconds": (arrow.timestamp("ns"), range(60)),
        "time zone": (arrow.timestamp("us", tz="Europe/Berlin"), range(60)),
        "duration": (arrow.duration("ns"), range(60)),
        "list": (arrow.list_(arrow.int64()), [[at, 2] for at in range(60)]),
        "int": (arrow.int32(), range(60)),
        "text": (arrow.string(), list(map(str, range(60)))),
    }[kind]

    def rows(cells):
        path = tmp_path / "table.parquet"
        parquet.write_table(arrow.table({"cell": arrow.array(cells, form)}), path)
        return content_rows([cells for _, cells in parquet_columns(path)])

    assert rows(list(values)) == rows([*values, None])[:-1]


VISITS = np.random.default_rng(7).integers(0, 80, 400)


def owners_held_out(owners, part="test", seed=0):
    mask = hold_out([np.arange(len(owners))], owners, 0.3, part, by="owner", seed=seed)
    return {int(owner) for owner in owners[mask]}, mask


def test_whole_owners_are_held_out_by_their_ids_alone():
    before, mask = owners_held_out(VISITS)
    assert not before & set(VISITS[~mask].tolist())
    assert 8 <= len(before) <= 42  # Binomial(80, 0.3), mean 24, std 4.1: beyond it below 1e-4
    for removed in range(0, 80, 4):  # an owner with all their records
        after, _ = owners_held_out(VISITS[removed != VISITS])
        assert after == before - {removed}
    for at in range(0, 400, 20):  # one record
        fewer = np.delete(VISITS, at)
        assert owners_held_out(fewer)[0] == before & set(fewer.tolist())
    order = np.random.default_rng(0).permutation(400)
    assert owners_held_out(VISITS[order])[0] == before
    assert owners_held_out(VISITS.astype(str))[0] == before  # however the ids are stored
    others = owners_held_out(VISITS, "validation")[0], owners_held_out(VISITS, seed=1)[0]
    assert before not in others


def test_a_table_can_be_split_by_owner(tmp_path):
    path = tmp_path / "t.csv"
    lines = [f"p{owner:02d},{at % 9},{at % 2}\n" for at, owner in enumerate(VISITS)]
    path.write_text("who,x,y\n" + "".join(lines))
    options = {"target": "y", "classes": [0, 1], "features": {"x": [0, 9]}}
    data = load_table(path, owner="who", split_by="owner", **options)
    train, test = (set(part.columns["owner"].tolist()) for part in (data.train, data.test))
    assert train
    assert test
    assert not train & test
    with pytest.raises(ow.OwnerwiseError, match="the records have no owners: name the column"):
        load_table(path, split_by="owner", **options)
    with pytest.raises(ow.OwnerwiseError, match="split_by is 'ower'; did you mean 'owner'"):
        load_table(path, owner="who", split_by="ower", **options)
    with pytest.raises(ow.OwnerwiseError, match="holds out none of the"):
        load_table(path, owner="who", split_by="owner", test_share=1e-9, **options)


def test_statistics_of_a_table_never_include_held_out_owners(tmp_path):
    """If they did, a record of a held-out owner would change the inputs of the others."""
    ids = np.array([f"p{owner:02d}" for owner in VISITS])
    mask = hold_out([], ids, 0.2, "test", by="owner")

    def inputs_with(who, value):
        path = tmp_path / f"{who}{value}.csv"
        cells = np.where(ids == who, value, np.arange(len(ids)) % 9)
        rows = [
            f"{name},{cell},{at % 2}\n"
            for at, (name, cell) in enumerate(zip(ids, cells, strict=True))
        ]
        path.write_text("who,x,y\n" + "".join(rows))
        with pytest.warns(ow.PrivacyWarning):
            data = load_table(path, target="y", owner="who", classes=[0, 1], features=["x"],
                              scale="statistics", split_by="owner")  # fmt: skip
        return data.train.inputs

    for who, held in ((ids[mask][0], True), (ids[~mask][0], False)):
        assert np.array_equal(inputs_with(who, 1), inputs_with(who, 1000)) == held
