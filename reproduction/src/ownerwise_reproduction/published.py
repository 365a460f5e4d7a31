"""What the results folder already says about studies whose runs are not at hand.

Runs are large and stay out of the repository; their pages are part of it. When `table` writes to a
folder with pages of other studies, those studies keep their sections in the overview, their rows in
the table of claims and the links to their pages. Studies with runs at hand are written anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from ownerwise_reproduction import claims
from ownerwise_reproduction.claims import Finding, restated
from ownerwise_reproduction.summary import Study

OVERVIEW, CLAIMS, FURTHER = "README.md", "claims.json", "## Beyond the papers' tables"
_STUDY = re.compile(r"## \[.+\]\((?P<study>.+)/index\.md\)")
_LINK = re.compile(r"- \[(?P<title>.+)\]\((?P<page>.+)\)")


@dataclass(frozen=True)
class Published:
    """The overview in a results folder.

    Attributes:
        sections: {study: its section of the overview}.
        findings: the findings in the table of claims.
        further: {title: file} of other pages.
    """

    sections: Mapping[str, str] = field(default_factory=dict)
    findings: Sequence[Finding] = ()
    further: Mapping[str, str] = field(default_factory=dict)

    def without(self, studies: Collection[str]) -> Published:
        """Return what is published about other studies than these."""
        return Published(
            {name: section for name, section in self.sections.items() if name not in studies},
            [finding for finding in self.findings if finding.study not in studies],
            self.further,
        )

    def completed(self, findings: Sequence[Finding]) -> list[Finding]:
        """Return findings together with the published ones on the same claims, in their order.

        A claim that was added later takes what is published on the same measurement.
        """
        complete = []
        for claim in dict.fromkeys(finding.claim for finding in findings):
            new = [one for one in findings if one.claim == claim and one.study is not None]
            old = [one for one in self.findings if one.claim == claim]
            if not new + old:
                known = (restated(one, claim) for one in self.findings)
                old = [one for one in known if one is not None]
            missing = [one for one in findings if one.claim == claim and one.study is None]
            complete += sorted(new + old, key=lambda one: str(one.study)) or missing
        return complete


def lost_methods(folder: str | PathLike, studies: Sequence[Study]) -> dict[str, list[str]]:
    """Return {study: labels of its published methods that have no runs at hand}."""
    found = {}
    for study in studies:
        path = Path(folder) / study.name / "runs.json"
        stored = json.loads(path.read_text(encoding="utf-8"))["methods"] if path.exists() else {}
        lost = [one["label"] for name, one in stored.items() if name not in study.methods]
        if lost:
            found[study.heading] = lost
    return found


def read(folder: str | PathLike) -> Published:
    """Return what is published in a folder; studies whose pages are gone are left out."""
    folder = Path(folder)
    overview, table = folder / OVERVIEW, folder / CLAIMS
    if not overview.exists():
        return Published()
    parts = re.split(r"\n\n(?=## )", overview.read_text(encoding="utf-8").rstrip("\n"))
    sections, further = {}, {}
    for part in parts:
        if found := _STUDY.match(part):
            if (folder / found["study"] / "runs.json").exists():
                sections[found["study"]] = part
        elif part.startswith(FURTHER):
            further = {link["title"]: link["page"] for link in _LINK.finditer(part)}
    stored = json.loads(table.read_text(encoding="utf-8")) if table.exists() else []
    findings = [one for one in map(_finding, stored) if one.study in sections]
    return Published(sections, findings, further)


def _finding(stored: Mapping[str, Any]) -> Finding:
    return Finding(**{**stored, "claim": claims.stored(stored["claim"])})
