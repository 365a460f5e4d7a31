"""Individualized PATE: a student learns from noised votes of teachers on public questions.

This package may import everything up to `training`; nothing imports it but the public names.
`plans` says who pays how much, `shards` which teachers hold which records, `teachers` trains them
all at once, and `answering` releases noised answers.
"""

from ownerwise.pate.answering import NO_ANSWER, answer, weighted_counts
from ownerwise.pate.plans import PatePlan
from ownerwise.pate.plans import make_pate_plan as plan
from ownerwise.pate.shards import content_ids, shards_of
from ownerwise.pate.teachers import Teachers, train_teachers

__all__ = [
    "NO_ANSWER",
    "PatePlan",
    "Teachers",
    "answer",
    "content_ids",
    "plan",
    "shards_of",
    "train_teachers",
    "weighted_counts",
]
