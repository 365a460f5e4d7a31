"""The papers' public data sets, the sources of their files, and simulated owners."""

from ownerwise_reproduction.data.cifar import CIFAR10, CIFAR100, load_cifar10, load_cifar100
from ownerwise_reproduction.data.clinic import (
    CTG,
    HEART,
    PARKINSONS,
    TELEMONITORING,
    load_ctg,
    load_heart,
    load_parkinsons,
    load_parkinsons_telemonitoring,
)
from ownerwise_reproduction.data.mnist import FASHION_MNIST, MNIST, load_fashion_mnist, load_mnist
from ownerwise_reproduction.data.people import ADULT, CREDIT, load_adult, load_credit_default
from ownerwise_reproduction.data.small_images import PNEUMONIA, SVHN, load_pneumoniamnist, load_svhn
from ownerwise_reproduction.data.texts import IMDB, SURNAMES, load_imdb, load_surnames

__all__ = [
    "SOURCES",
    "load_adult",
    "load_cifar10",
    "load_cifar100",
    "load_credit_default",
    "load_ctg",
    "load_fashion_mnist",
    "load_heart",
    "load_imdb",
    "load_mnist",
    "load_parkinsons",
    "load_parkinsons_telemonitoring",
    "load_pneumoniamnist",
    "load_surnames",
    "load_svhn",
]

SOURCES = {
    source.name: source
    for source in (
        *(ADULT, CIFAR10, CIFAR100, CREDIT, CTG, FASHION_MNIST, HEART, IMDB),
        *(MNIST, PARKINSONS, PNEUMONIA, SURNAMES, SVHN, TELEMONITORING),
    )
}
"""The files of each data set, by name."""
