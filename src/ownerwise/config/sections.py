"""The sections of a configuration file: every key with its rule and its meaning.

The tables in docs/configuration.md are generated from here, so the meanings are written in
Markdown, and their links are relative to that page.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ownerwise.accounting import ACCOUNTANTS, FILTERS, NOISES, SHAPES
from ownerwise.data.splits import SPLITS
from ownerwise.data.targets import range_problems
from ownerwise.mechanisms import CLIPPING_RULES, LOSSES, WEIGHTS
from ownerwise.owners import UNITS
from ownerwise.planning import METHODS
from ownerwise.training import LOGGERS
from ownerwise.training.settings import RULES
from ownerwise.training.values import (
    POSITIVE,
    ValueRule,
    between,
    choice,
    either,
    elsewhere,
    flag,
    list_of,
    table,
    text,
    texts,
    whole,
    within,
)

OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}

ASSIGNMENT_KEYS: Mapping[str, ValueRule] = {
    "kind": text(),
    "budgets": either(
        "a list of positive numbers, or a table {name = number}",
        list_of("", POSITIVE.fits),
        table("", POSITIVE.fits),
    ),
    "classes": table("a table {owner = [classes]}", texts().fits),
    "seed": whole(0),
}
"""Rules for the keys that all assignments share; each assignment checks its other keys."""

SECTIONS: Mapping[str, Mapping[str, ValueRule]] = {
    "run": {
        "name": text().means("name of the run; by default the name of the file"),
        "folder": text().means("run folder; by default `runs/NAME`"),
        "label": text().means(
            "name of the method in reports; by default derived from the plan and the weights"
        ),
        "seed": RULES["seed"].means("fixed seed for noise, batches and initial weights"),
        "evaluate_every": RULES["evaluate_every"].means(
            "number of steps between history lines; by default chosen to give about 20 lines"
        ),
        "checkpoint_every": RULES["checkpoint_every"].means(
            "number of steps between checkpoints; by default the same as `evaluate_every`"
        ),
        "loggers": elsewhere(f"a list of {' or '.join(LOGGERS)}").means(
            "loggers that receive the history lines in addition to the run folder"
        ),
    },
    "data": {
        "name": text().means("name of a [data set](api/data.md#data-sets-by-name)"),
        "options": table("a table of data set options").means(
            "options for the data set's loader, such as `scale`"
        ),
        "only": texts().means("keep only these classes"),
        "extractor": table("a table with a name and options").means(
            "[features](how-to/images.md#pretrained-features) that replace the inputs, such as "
            '`{ name = "efficientnet-lite0", size = 112 }`, or `{ name = "minilm" }` for '
            "[texts](how-to/text.md#pretrained-features)"
        ),
        "file": text().means("CSV, Parquet or .npz file with one row per record"),
        "target": text().means(
            "column with the class of each record, or its number (`target_range`)"
        ),
        "owner": text().means("column with the owner of each record"),
        "features": either(
            "a list of columns, or a table {column = range}", texts(), table("")
        ).means(
            "the inputs, with [ranges, categories, dates and units](how-to/tables.md) from public "
            "knowledge; for a column that "
            "names [picture files](how-to/tables.md#pictures), a table of options; for a column of "
            '[texts](how-to/text.md#pretrained-features), `"text"`'
        ),
        "classes": list_of("a list", lambda value: isinstance(value, str | int)).means(
            "all classes; by default taken from the records, which is NOT private"
        ),
        "target_range": ValueRule(
            "[low, high], two finite numbers with low < high", lambda v: not range_problems(v)
        ).means(
            "public range of a numeric target: the run is then a "
            "[regression](how-to/regression.md), and `classes` is left out"
        ),
        "missing": list_of("a list of codes", lambda value: isinstance(value, str | int)).means(
            'codes of missing values in all columns, such as `["NA", -9]`, in addition to empty '
            'cells and "?"'
        ),
        "columns": texts().means("additional columns to keep"),
        "scale": choice(("ranges", "released", "statistics", "none")).means(
            "how numbers are scaled: by declared ranges (default), by statistics that "
            "`plan.statistics` pays for (`released`, which follows from it), or by statistics of "
            "the records without noise, which is NOT private"
        ),
        "test_share": between(0, 1).means(
            "probability that a public hash makes a record, or an owner with all of their records, "
            "part of the test data; 0.2 by default"
        ),
        "split_by": choice(SPLITS).means(
            "what is held out as test and validation data: single `record`s, or each `owner` as a "
            "whole ([how-to](how-to/patients.md#hold-out-whole-owners)); the same as `plan.unit` "
            "by default"
        ),
        "validation_share": between(0, 1).means(
            "probability that a public hash selects a training record, or an owner, for "
            "validation; by default, the validation or test part of the data set is used"
        ),
        "validation_seed": whole(0).means(
            "public seed for the hash that chooses the validation records; 0 by default"
        ),
    },
    "owners": {
        "budgets": text().means("CSV or Parquet file of [budgets](how-to/budgets.md)"),
        "epsilon": table("a table {owner = positive number or level}").means(
            "budgets given directly in the configuration"
        ),
        "column": text().means(
            "column of the data that names each record's owner; by default `data.owner`"
        ),
        "separator": text().means(
            "text between the ids of several owners in a cell of the column, such as `;`; by "
            "default, a cell is the id of a single owner"
        ),
        "named": flag().means(
            "show results under the names of owners, such as clinics; by default, owners may be "
            "people, and results are shown by budget"
        ),
        "max_records": whole(1).means(
            "keep at most this many training records of each owner, selected by a public hash; "
            'needed for `unit = "owner"` with `sampling = "record"` unless every owner '
            "[declares their number](how-to/patients.md#record-sampling)"
        ),
        "levels": table("a table {level = positive number}", POSITIVE.fits).means(
            "epsilon for each named budget level"
        ),
        "assignment": table("a table with kind and budgets").means(
            "assigns records of a public data set to fictitious owners, for experiments"
        ),
        "delta": between(0, 1).means(
            "delta for owners without one of their own (no column, or a blank cell); 1e-5 by "
            "default"
        ),
    },
    "plan": {
        "method": elsewhere(f"one of {', '.join(METHODS)}").means(
            "how budgets become sampling rates and clip norms; `sample` by default"
        ),
        "steps": elsewhere("a whole number of at least 1").means("number of steps"),
        "epochs": elsewhere(POSITIVE.expected).means(
            "expected number of times that each record is drawn, instead of `steps`; needs "
            "`batch_size`"
        ),
        "batch_size": elsewhere(POSITIVE.expected).means("expected number of records per step"),
        "noise_multiplier": elsewhere(POSITIVE.expected).means(
            "noise standard deviation divided by the clip norm"
        ),
        "clip_norm": elsewhere(POSITIVE.expected).means(
            'bound on the norm of a record\'s gradient; 1 by default; or `"adaptive"`, or a table '
            "such as `{ quantile = 0.75, initial = 1.0 }` "
            "([adaptive](planning.md#a-clip-norm-that-adapts))"
        ),
        "accountant": elsewhere(f"one of {', '.join(ACCOUNTANTS)}").means(
            "`pld` (tight) by default"
        ),
        "mixture": elsewhere("a number from 0 to 1").means(
            "for `both`: from 0 (sample) to 1 (scale); 0.5 by default. For `individual`: from 0 "
            "(one clip norm) to 1 (clip norms by budget); 1 by default"
        ),
        "clipped_steps": elsewhere(POSITIVE.expected).means(
            "for `individual`: the number of steps that a budget pays for if every gradient is "
            "clipped; the noise follows from it; the same as `steps` by default "
            "([how-to](how-to/individual-accounting.md))"
        ),
        "filter": elsewhere(f"one of {', '.join(FILTERS)}").means(
            "for `individual`: how the costs of a record add up; `gdp` (tight) by default"
        ),
        "clip_to_remaining": flag().means(
            "for `individual`: whether a record takes part once more, clipped to what remains of "
            "its budget, before it retires"
        ),
        "noise_schedule": elsewhere(
            "a name, a table with name and options, or a list of [steps, factor] pairs"
        ).means(
            "`constant` (default), `exponential`, `time`, `step`, `polynomial` "
            "([planning](planning.md#noise-schedules))"
        ),
        "release_std": elsewhere(POSITIVE.expected).means(
            "noise standard deviation of an additional release with sensitivity 1, such as the "
            "count that controls importance sampling"
        ),
        "release_share": elsewhere("a number between 0 and 1").means(
            "fraction of a step's privacy cost that is spent on the release; set this or "
            "`release_std`"
        ),
        "release_noise": elsewhere(f"one of {', '.join(NOISES)}").means(
            "`gaussian` by default; `laplace` needs `pld`, and vectors with an L1 norm of at most 1"
        ),
        "calibration": elsewhere("true, a name, or a table with options").means(
            "pay for a release after training that removes the tilt of the class biases; options "
            "`share`, `rounds` and `pull` ([why](proofs/calibration.md))"
        ),
        "statistics": elsewhere("true, or a table with share").means(
            "pay for the mean and the standard deviation of every column of numbers, released "
            "before training, by which the inputs are scaled and missing values filled in; `share` "
            "is the fraction of the strictest budget, 0.05 by default "
            "([why](proofs/statistics.md))"
        ),
        "unit": elsewhere(f"one of {', '.join(UNITS)}").means(
            "what each epsilon protects: one `record` (default), or the `owner` with all of their "
            "records ([how-to](how-to/patients.md))"
        ),
        "sampling": elsewhere(f"one of {', '.join(UNITS)}").means(
            "what is drawn at each step; the same as `unit` by default"
        ),
        "records_per_owner": elsewhere('a whole number of at least 1, or "all"').means(
            "if owners are sampled, the most records of an owner in one step; 8 by default"
        ),
        "strict": flag().means("refuse plans in which some owner cannot use up their budget"),
        "hardened": flag().means(
            "pad every batch to a fixed number of rows and place the records in secret, random "
            "rows ([why](proofs/arithmetic.md#secret-rows))"
        ),
    },
    "model": {"name": elsewhere("a string").means("the network")},  # plus the model's options
    "training": {
        "optimizer": choice(OPTIMIZERS).means("`sgd` by default"),
        "lr": RULES["lr"].means("learning rate; required"),
        "momentum": within(0, 1).means("for sgd and rmsprop"),
        "options": table("a table of additional optimizer options").means(
            "additional options, such as `{ weight_decay = 1e-4 }`"
        ),
        "schedule": elsewhere("a name, or a table with name and options").means(
            "`constant` (default), `linear`, `cosine`, `step`; options `warmup`, `floor`, `every`, "
            "`factor`"
        ),
        "averaging": RULES["averaging"].means(
            "decay rate of a running average of the model, which then becomes the result "
            "at no privacy cost; off by default"
        ),
        "loss": elsewhere(
            f"one of {', '.join(LOSSES)}, your own, or a table with name and options"
        ).means(
            "`cross_entropy` by default; with `data.target_range`, `mse_loss` (default), "
            "`l1_loss`, `huber_loss` or `smooth_l1_loss`, of targets scaled to [-1, 1]"
        ),
        "clipping": elsewhere(
            f"one of {', '.join(CLIPPING_RULES)}, your own, or a table with kind and options"
        ).means(
            "clipping rule; `standard` by default; options `stability` (auto_s), `r` (psac), "
            "`accepted_batch`, `acceptance`, `gain` "
            "([importance](how-to/importance-sampling.md))"
        ),
        "release": elsewhere("your own, or a table with kind and options").means(
            "an additional [release](api/mechanisms.md) at every step, which the plan accounts for"
        ),
        "repair": elsewhere("a table with counts and options").means(
            "shift the outputs in the loss by the [pull](how-to/repair.md) of each class; `counts` "
            "is a CSV file of published label counts, and `tau`, `aim` and `least_records` are "
            "options"
        ),
        "device": text().means(
            'where to train, such as `"cuda"` ([how-to](how-to/devices.md)); the CPU by default'
        ),
        "micro_batch_size": whole(1).means(
            "number of records processed together; by default chosen to fit in memory"
        ),
        "lean": flag().means("use less memory, but train more slowly"),
    },
    "weights": {  # plus the options of other weights
        "kind": elsewhere(f"one of {', '.join(WEIGHTS)}, or your own").means(
            "ordered importance weights; the options below are those of `ino`"
        ),
        "tail": elsewhere("a number from 0 to 1").means(
            "length of the tail as a fraction of the expected total clip norm; 0.4 by default"
        ),
        "tail_length": elsewhere("a number of at least 0").means(
            "length of the tail in units of the clip norm"
        ),
        "alpha": elsewhere(POSITIVE.expected).means(
            "first shape parameter of the beta tail; 1 by default"
        ),
        "beta": elsewhere(POSITIVE.expected).means(
            "second shape parameter of the beta tail; 1 by default"
        ),
        "kappa": elsewhere("a number of at least 0").means(
            "how much the budgets influence the order of the records; 0 by default"
        ),
        "width": elsewhere("0, or a number from 0.01 to 10").means(
            "smoothness of the order; 0.5 by default; 0 (a hard order) requires a hardened plan"
        ),
        "order": elsewhere("a string").means(
            "how records are ordered; `loss` by default; other packages may provide more orders"
        ),
        "shape": elsewhere('"beta", "steps", or a list of decreasing values from 0 to 1').means(
            "shape of the tail function; `beta` by default"
        ),
    },
    "tuning": {
        "space": table("a table {section.key = [values]}").means(
            "values to combine, such as `{ training.lr = [0.1, 0.5], plan.clip_norm = [0.5, 1.0] "
            "}`, from the sections `plan`, `model`, `training` and `weights` "
            "([how-to](how-to/private-tuning.md))"
        ),
        "candidates": list_of("a list of tables", lambda one: isinstance(one, Mapping)).means(
            "the candidates themselves, instead of `space`, such as `[{ training.lr = 0.1 }, ...]`"
        ),
        "law": choice(SHAPES).means(
            "law of the secret number of runs: `logarithmic`, `geometric` (default) or `poisson`"
        ),
        "runs": POSITIVE.means("expected number of runs; 10 by default"),
        "always_run": flag().means(
            "always make so many runs that time tells nothing about their number"
        ),
        "score": choice(("paid", "public")).means(
            "`paid` (default): a noised count of correct predictions on the validation records, "
            "which every owner pays for; `public`: the validation records are public"
        ),
        "score_std": POSITIVE.means("noise standard deviation of a paid score"),
        "score_share": between(0, 1).means(
            "sets the noise of a paid score: the strictest budget could pay for 1 / `score_share` "
            "such scores; 0.02 by default"
        ),
    },
}
"""Sections and keys of a configuration. A section in `OPEN` also accepts the options of the object
that its name or kind refers to."""

OPEN = ("model", "weights")
