"""Parquet files that are read one row group at a time."""

import pickle

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

import ownerwise as ow
from ownerwise.data import ParquetRecords

RECORDS = 60


def written(path, columns, rows=7, **options):
    parquet.write_table(pa.table(columns), path, row_group_size=rows, **options)
    return path


@pytest.fixture
def columns():
    rng = np.random.default_rng(0)
    return {
        "a": rng.normal(size=RECORDS),
        "b": rng.integers(0, 9, RECORDS),
        "c": rng.normal(size=RECORDS).astype(np.float32),
        "label": rng.integers(0, 3, RECORDS),
    }


def expected(columns, names=("a", "b", "c")):
    return torch.from_numpy(np.stack([columns[n].astype(np.float32) for n in names], axis=1))


@pytest.mark.parametrize("rows", [1, 7, RECORDS, 1000])
def test_every_record_is_read_in_any_order(columns, rows, tmp_path):
    records = ParquetRecords(
        written(tmp_path / "t.parquet", columns, rows), ["a", "b", "c"], "label"
    )
    assert len(records) == RECORDS
    order = np.random.default_rng(1).permutation(RECORDS).tolist()
    order += [3, 3, -1]
    found = records.__getitems__(order)
    assert torch.equal(torch.stack([x for x, _ in found]), expected(columns)[order])
    assert [int(y) for _, y in found] == columns["label"][order].tolist()
    assert found[0][0].dtype == torch.float32
    assert found[0][1].dtype == torch.int64
    assert torch.equal(records[5][0], expected(columns)[5])
    assert records.__getitems__([]) == []
    with pytest.raises(IndexError):
        records[RECORDS]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_hold_the_rows_that_were_drawn(columns, workers, tmp_path):
    records = ParquetRecords(written(tmp_path / "t.parquet", columns), ["a", "b", "c"], "label")
    owners = ow.Owners(np.arange(RECORDS) % 3, {0: 1.0, 1: 2.0, 2: 4.0})
    plan = ow.plan(owners, "sample", steps=4, batch_size=12)
    drawn = 0
    for batch in ow.PoissonBatches(records, plan, num_workers=workers):
        assert torch.equal(batch.data[0], expected(columns)[batch.indices])
        assert batch.data[1].tolist() == columns["label"][batch.indices].tolist()
        drawn += len(batch)
    assert drawn


def test_lists_are_inputs_too_and_targets_may_be_numbers(tmp_path):
    vectors = np.random.default_rng(0).normal(size=(20, 5)).astype(np.float32)
    for kind in (pa.list_(pa.float32()), pa.list_(pa.float32(), 5)):
        column = {"v": pa.array(list(vectors), kind), "y": np.linspace(0, 1, 20)}
        records = ParquetRecords(written(tmp_path / "t.parquet", column), "v", "y")
        assert torch.equal(torch.stack([x for x, _ in records]), torch.from_numpy(vectors))
        assert records[3][1].dtype == torch.float32


@pytest.mark.parametrize("lists", [[[1.0], [1.0, 2.0]], [[1.0], [1.0, 2.0, 3.0]], [[None], [1.0]]])
def test_lists_of_several_lengths_are_never_cut_into_equal_ones(lists, tmp_path):
    """[1], [1, 2, 3] holds as many numbers as two lists of two: records would mix."""
    path = written(tmp_path / "t.parquet", {"v": pa.array(lists), "y": [0, 1]})
    with pytest.raises(ValueError, match="differ in length or have empty entries"):
        ParquetRecords(path, "v", "y")[0]


def test_arrays_on_disk_are_the_same_records(columns, tmp_path):
    records = ParquetRecords(written(tmp_path / "t.parquet", columns), ["a", "b", "c"], "label")
    inputs, targets = records.to_arrays(tmp_path / "arrays")
    assert isinstance(inputs, np.memmap)
    assert np.array_equal(inputs, expected(columns).numpy())
    assert np.array_equal(targets, columns["label"])
    assert np.array_equal(np.load(tmp_path / "arrays" / "inputs.npy"), inputs)
    with pytest.raises(ow.OwnerwiseError, match=r"inputs\.npy exists already"):
        records.to_arrays(tmp_path / "arrays")


def test_problems_with_columns_are_listed_together_before_any_record_is_read(columns, tmp_path):
    path = written(tmp_path / "t.parquet", {**columns, "name": ["x"] * RECORDS})
    with pytest.raises(ow.OwnerwiseError) as caught:
        ParquetRecords(path, ["a", "age", "name"], "class")
    assert len(caught.value.problems) == 2
    assert "no column age and class" in str(caught.value) or "age, class" in str(caught.value)
    assert "column name of" in str(caught.value)
    with pytest.raises(ow.OwnerwiseError, match="inputs is empty"):
        ParquetRecords(path, [], "label")
    (tmp_path / "bad.parquet").write_text("a,b\n1,2\n")
    with pytest.raises(ow.OwnerwiseError, match="cannot be read as Parquet"):
        ParquetRecords(tmp_path / "bad.parquet", "a", "b")


def test_an_empty_cell_spends_the_step_without_naming_the_record(tmp_path):
    path = written(tmp_path / "t.parquet", {"a": pa.array([1.0, None] * 30), "y": [0, 1] * 30})
    plan = ow.plan(ow.Owners(np.zeros(60, int), {0: 1.0}), "uniform", steps=1, batch_size=30)
    (batch,) = ow.PoissonBatches(ParquetRecords(path, "a", "y"), plan)
    assert batch.data.error == "ValueError"


def test_an_open_file_is_not_pickled(columns, tmp_path):
    records = ParquetRecords(written(tmp_path / "t.parquet", columns), ["a", "c"], "label")
    again = pickle.loads(pickle.dumps(records))
    assert torch.equal(again[7][0], records[7][0])
