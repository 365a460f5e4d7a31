"""Owners: who owns which record, and the privacy budget that each owner sets.

This package may import only `errors`. It also reads tables for the `data` package, so that owner
ids are read the same way from tables of budgets and tables of records.
"""

from ownerwise.owners.frozen import frozen
from ownerwise.owners.hints import Hints
from ownerwise.owners.ids import as_ids, text_ids
from ownerwise.owners.owners import UNITS, Owners
from ownerwise.owners.shared import (
    Shared,
    flat_ids,
    of_holders,
    records_of_holders,
    split_ids,
    together,
)
from ownerwise.owners.tables import (
    HEADER_ALONE,
    PARQUET,
    as_array,
    csv_rows,
    is_missing,
    parquet_columns,
    plain_number,
)

__all__ = [
    "HEADER_ALONE",
    "PARQUET",
    "UNITS",
    "Hints",
    "Owners",
    "Shared",
    "as_array",
    "as_ids",
    "csv_rows",
    "flat_ids",
    "frozen",
    "is_missing",
    "of_holders",
    "parquet_columns",
    "plain_number",
    "records_of_holders",
    "split_ids",
    "text_ids",
    "together",
]
