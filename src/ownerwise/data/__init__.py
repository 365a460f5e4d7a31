"""Load your own tables and pictures, or data sets by name, and assign records to owners.

Loaders return a `DataSet`: records, their targets and any other columns. Apart from the root
modules, this package imports only `owners`, to use its table reader.
"""

from ownerwise.data import assign
from ownerwise.data.assign import ASSIGNMENTS, Assignment
from ownerwise.data.digits import load_digits
from ownerwise.data.features import Category, Date, Number
from ownerwise.data.pictures import Pictures
from ownerwise.data.records import DataSet, Records
from ownerwise.data.registry import LOADERS, load
from ownerwise.data.tables import NewRecords, load_inputs, load_table
from ownerwise.data.vocabulary import Vocabulary, tokenize

__all__ = [
    "ASSIGNMENTS",
    "LOADERS",
    "Assignment",
    "Category",
    "DataSet",
    "Date",
    "NewRecords",
    "Number",
    "Pictures",
    "Records",
    "Vocabulary",
    "assign",
    "load",
    "load_digits",
    "load_inputs",
    "load_table",
    "tokenize",
]
