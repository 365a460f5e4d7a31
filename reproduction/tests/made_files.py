"""Tiny files in the formats of the real ones."""

import gzip
import io
import lzma
import struct
import tarfile
import zipfile

import numpy as np
from scipy.io import savemat

from ownerwise_reproduction.data.clinic import (
    CTG_COLUMNS,
    PARKINSONS_COLUMNS,
    TELEMONITORING_COLUMNS,
)
from ownerwise_reproduction.data.people import CREDIT_COLUMNS
from ownerwise_reproduction.data.texts import LANGUAGES
from tools.data_tools import write

PACK = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


def pixels(records, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (records, *shape), dtype=np.uint8)


def idx(array):
    """An IDX file of unsigned bytes."""
    header = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


def make_mnist(folder, ending="", records=(20, 10), classes=10):
    folder.mkdir(parents=True, exist_ok=True)
    for stem, count in zip(("train", "t10k"), records, strict=True):
        labels = np.arange(count, dtype=np.uint8) % classes
        images = pixels(count, 28, 28)
        images[0, 0, :2] = 0, 255
        (folder / f"{stem}-images-idx3-ubyte{ending}").write_bytes(PACK[ending](idx(images)))
        (folder / f"{stem}-labels-idx1-ubyte{ending}").write_bytes(PACK[ending](idx(labels)))


def old_pickle(content):
    """A dict as Python 2 pickled it (protocol 2): names, lists of small ints, and one array."""
    out = b"\x80\x02}("
    for key, value in content.items():
        out += b"U" + bytes((len(key),)) + key.encode()
        if isinstance(value, np.ndarray):
            out += b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR"
            out += b"(K\x01" + b"".join(b"M" + struct.pack("<H", side) for side in value.shape)
            out += b"\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xff"
            out += b"J\xff\xff\xff\xffK\x00tb\x89T" + struct.pack("<i", value.size)
            out += value.tobytes() + b"tb"
        elif isinstance(value, str):
            out += b"U" + bytes((len(value),)) + value.encode()
        else:
            out += b"](" + b"".join(b"K" + bytes((number,)) for number in value) + b"e"
    return out + b"u."


def cifar_files(name, records=20):
    """The files of CIFAR-10 or CIFAR-100 by name; each part has other images."""
    if name == "cifar10":
        parts = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
        keys = {"labels": 10}
    else:
        parts, keys = ["train", "test"], {"fine_labels": 100, "coarse_labels": 20}
    return {
        part: old_pickle(
            {
                "batch_label": part,
                **{key: [(k + seed) % n for k in range(records)] for key, n in keys.items()},
                "data": pixels(records, 3072, seed=seed),
            }
        )
        for seed, part in enumerate(parts)
    }


def make_folder(folder, files, ending=""):
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / f"{name}{ending}").write_bytes(PACK[ending](content))


def make_tar(path, files, kind="gz"):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, f"w:{kind}") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def make_svhn(folder, records=(20, 10)):
    folder.mkdir(parents=True)
    for part, count in zip(("train", "test"), records, strict=True):
        labels = (np.arange(count) % 10 + 1).astype(np.uint8)[:, None]
        savemat(folder / f"{part}_32x32.mat", {"X": pixels(32, 32, 3, count), "y": labels})


def make_pneumonia(folder, records=(20, 6, 10)):
    folder.mkdir(parents=True)
    arrays = {}
    for part, count in zip(("train", "val", "test"), records, strict=True):
        arrays[f"{part}_images"] = pixels(count, 28, 28)
        arrays[f"{part}_labels"] = (np.arange(count) % 2).astype(np.uint8)[:, None]
    np.savez(folder / "pneumoniamnist.npz", **arrays)


def xls(sheets):
    """An Excel workbook (BIFF5, without its container) of sheets with text and numbers."""

    def record(kind, body=b""):
        return struct.pack("<HH", kind, len(body)) + body

    def cell(row, column, value):
        place = struct.pack("<HHH", row, column, 0)
        if isinstance(value, str):
            text = value.encode("latin-1")
            return record(0x204, place + struct.pack("<H", len(text)) + text) if text else b""
        return record(0x203, place + struct.pack("<d", value))

    def start(kind):
        return record(0x809, struct.pack("<HHHH", 0x500, kind, 0, 0))

    def head(offsets):
        entries = [
            record(0x85, struct.pack("<IHB", offset, 0, len(name)) + name.encode())
            for offset, name in zip(offsets, sheets, strict=True)
        ]
        return start(5) + record(0x42, struct.pack("<H", 1252)) + b"".join(entries) + record(0x0A)

    bodies = []
    for rows in sheets.values():
        cells = (cell(r, c, value) for r, row in enumerate(rows) for c, value in enumerate(row))
        bodies.append(start(0x10) + b"".join(cells) + record(0x0A))
    lengths = [len(head([0] * len(bodies))), *map(len, bodies)]
    return head(np.cumsum(lengths)[:-1].tolist()) + b"".join(bodies)


def csv_text(rows):
    return "".join(",".join(map(str, row)) + "\n" for row in rows)


ADULT_ROW = (
    "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, "
    "{sex}, 2174, 0, 40, {country}, {income}\n"
)


def make_adult(folder):
    row = ADULT_ROW.format
    train = row(sex="Male", country="United-States", income="<=50K")
    train += row(sex="Female", country="?", income=">50K") + "\n"
    test = "|1x3 Cross validator\n" + row(sex="Female", country="Cuba", income="<=50K.") + "\n"
    write(folder / "adult.data", train)
    write(folder / "adult.test", test)


def credit_rows(records=20):
    """Client k has the limit 1000 (k + 1), alternating sex, and defaults if k is odd."""
    rows = []
    for k in range(records):
        amounts = [*[100 * k] * 6, *[10 * k] * 6]
        rows.append([k + 1, 1000 * (k + 1), k % 2 + 1, 2, 1, 24 + k, *[0] * 6, *amounts, k % 2])
    return rows


def make_credit(folder, header=CREDIT_COLUMNS):
    write(folder / "UCI_Credit_Card.csv", csv_text([header, *credit_rows()]))


def ctg_rows(records=20):
    """Recording k lasts 100 s, counts k accelerations, and is of the classes 1, 2, 3 in turn."""
    rows = []
    for k in range(records):
        values = {"FileName": f"f{k // 2}.txt", "Date": 35400.0, "SegFile": f"s{k}.txt"}
        values |= {"b": 50, "e": 150, "AC": k, "LB": 125, "CLASS": k % 10 + 1, "NSP": k % 3 + 1}
        rows.append([values.get(name, 0) for name in CTG_COLUMNS])
    return rows


def make_ctg(folder):
    write(folder / "CTG.csv", csv_text([CTG_COLUMNS, *ctg_rows()]))


def make_ctg_workbook(folder):
    blank = [""] * len(CTG_COLUMNS)
    sums = [*blank[:14], 0.0, 0.0, *blank[16:]]
    raw = [list(CTG_COLUMNS), blank, *ctg_rows(), blank, sums]
    write(folder / "CTG.xls", xls({"Description": [["text"]], "Raw Data": raw}))


def make_heart(folder):
    rows = ["63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0"] * 10
    rows += ["67.0,0.0,4.0,160.0,286.0,0.0,2.0,108.0,1.0,1.5,2.0,?,?,3"] * 10
    write(folder / "processed.cleveland.data", "\n".join(rows) + "\n")


def make_parkinsons(folder):
    rows = [
        [
            f"phon_R01_S{subject:02d}_{number}" if name == "name" else 0.0
            for name in PARKINSONS_COLUMNS
        ]
        for subject in range(1, 13)
        for number in (1, 2, 3)
    ]
    for row in rows:
        row[PARKINSONS_COLUMNS.index("status")] = int(int(row[0][10:12]) % 2 == 0)
    write(folder / "parkinsons.data", csv_text([PARKINSONS_COLUMNS, *rows]))


def make_telemonitoring(folder):
    rows = []
    for subject in range(1, 13):
        for visit in range(4):
            values = {"subject#": subject, "age": 60, "sex": subject % 2, "test_time": visit * 7.5}
            values |= {"motor_UPDRS": 20, "total_UPDRS": 20 + subject}
            rows.append([values.get(name, 0.5) for name in TELEMONITORING_COLUMNS])
    write(folder / "parkinsons_updrs.data", csv_text([TELEMONITORING_COLUMNS, *rows]))


def surname_files():
    """Six names for each language; the first is of that language alone."""
    names = {
        language: [f"{language}o", "Abé", "O'Neil", "Li", "Wu", "Xu"] for language in LANGUAGES
    }
    return {f"{language}.txt": "\n".join(lines).encode() for language, lines in names.items()}


def make_surnames(folder):
    make_folder(folder / "names", surname_files())


def make_surname_archive(folder):
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "data.zip", "w") as archive:
        for name, content in surname_files().items():
            archive.writestr(f"data/names/{name}", content)
        archive.writestr("__MACOSX/data/names/Arabic.txt", b"\x00")


def review_files():
    return {
        f"aclImdb/{part}/{label}/{number}_{rating}.txt": f"{label} film no. {number},<br />{part}!"
        for part in ("train", "test")
        for label, rating in (("neg", 2), ("pos", 9))
        for number in (0, 1, 10)
    } | {"aclImdb/README": "read me", "aclImdb/train/unsup/0_0.txt": "not labelled"}


def make_imdb(folder):
    files = {name: text.encode() for name, text in review_files().items()}
    make_tar(folder / "aclImdb_v1.tar.gz", files)


MAKERS = {
    "adult": make_adult,
    "cifar10": lambda folder: make_folder(folder / "cifar-10-batches-py", cifar_files("cifar10")),
    "cifar100": lambda folder: make_folder(folder / "cifar-100-python", cifar_files("cifar100")),
    "credit_default": make_credit,
    "ctg": make_ctg,
    "fashion_mnist": make_mnist,
    "heart": make_heart,
    "imdb": make_imdb,
    "mnist": make_mnist,
    "parkinsons": make_parkinsons,
    "parkinsons_telemonitoring": make_telemonitoring,
    "pneumoniamnist": make_pneumonia,
    "surnames": make_surnames,
    "svhn": make_svhn,
}


def make(name, root):
    """Make the files of a data set in its folder below `root`."""
    MAKERS[name](root / name)
    return root
