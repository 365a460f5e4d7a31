"""Data sets of the papers, tables of one's own, and ways to give records to owners."""

from ownerwise.data import assign
from ownerwise.data.assign import Assignment
from ownerwise.data.cifar import load_cifar10, load_cifar100
from ownerwise.data.clinic import (
    load_ctg,
    load_heart,
    load_parkinsons,
    load_parkinsons_telemonitoring,
)
from ownerwise.data.features import Category, Number
from ownerwise.data.mnist import load_fashion_mnist, load_mnist
from ownerwise.data.people import load_adult, load_credit_default
from ownerwise.data.pictures import Pictures
from ownerwise.data.records import DataSet, Records
from ownerwise.data.registry import LOADERS, NAMES, load
from ownerwise.data.small_images import load_digits, load_pneumoniamnist, load_svhn
from ownerwise.data.tables import load_table
from ownerwise.data.texts import load_imdb, load_surnames
from ownerwise.data.vocabulary import Vocabulary, tokenize

__all__ = [
    "LOADERS",
    "NAMES",
    "Assignment",
    "Category",
    "DataSet",
    "Number",
    "Pictures",
    "Records",
    "Vocabulary",
    "assign",
    "load",
    "load_adult",
    "load_cifar10",
    "load_cifar100",
    "load_credit_default",
    "load_ctg",
    "load_digits",
    "load_fashion_mnist",
    "load_heart",
    "load_imdb",
    "load_mnist",
    "load_parkinsons",
    "load_parkinsons_telemonitoring",
    "load_pneumoniamnist",
    "load_surnames",
    "load_svhn",
    "load_table",
    "tokenize",
]
