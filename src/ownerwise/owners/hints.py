"""Advice in messages about budgets, worded for the front end in use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hints:
    """The parts of messages that depend on the front end; the defaults are for the Python API.

    Attributes:
        record_owner: the name of the list of owner ids.
        levels: how to define budget levels.
        records: how to declare the numbers of records.
    """

    record_owner: str = "record_owner"
    levels: str = "pass levels={'high': 0.5, ...}"
    records: str = "declare the numbers of records with records="


API = Hints()
