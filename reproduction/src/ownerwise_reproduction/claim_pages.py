"""The table of the papers' claims in the results overview."""

from __future__ import annotations

from collections.abc import Sequence

from ownerwise.report.markdown import table
from ownerwise_reproduction import provenance
from ownerwise_reproduction.claims import VERDICTS, Claim, Finding, left_out, not_run


def page_part(findings: Sequence[Finding]) -> str:
    """Return the table of claims with notes, and a separate table of those that were not tested."""
    run = [finding for finding in findings if finding.study is not None]
    missing = [finding for finding in findings if finding.study is None]
    parts = []
    if run:
        found = [finding.verdict for finding in run]
        counts = [f"{found.count(word)} {word}" for word in VERDICTS if word in found]
        if "" in found:
            counts.append(f"{found.count('')} without a verdict, because the paper gives no number")
        rules = "; ".join(f"*{word}*: {rule}" for word, rule in VERDICTS.items() if word in found)
        parts += [
            f"{len(run)} claims were tested: {', '.join(counts)}. Another {len(missing)} claims "
            "were not tested. The short profile uses fewer steps than the papers.",
            f"{rules[:1].upper()}{rules[1:]}. Numbers are means and standard deviations over "
            "seeds, with our result minus the paper's in parentheses; differences are shown with "
            "their 95% interval over the seeds that both methods share. Prefix each command "
            f"with `{provenance.PROGRAM}`.",
            table(
                ["verdict", "claim", "model", "theirs", "ours", "command"],
                list(map(_row, run)),
                texts=6,
            ),
        ]
    claims = [finding.claim for finding in run if finding.claim.note]
    if claims:
        notes = (f"- {_place(claim)}, {claim.setting}: {claim.note}" for claim in claims)
        parts.append("\n".join(dict.fromkeys(notes)))
    if missing:
        parts.append(
            table(["not run", "theirs", "command"], list(map(_missing_row, missing)), texts=3)
        )
        parts.append("Why they were not run:\n\n" + _listed(not_run()))
    parts += [
        "The claims above do not cover these results:",
        _listed(left_out()),
    ]
    return "\n\n".join(parts)


def _listed(lines: Sequence[str]) -> str:
    return "\n".join(f"- {words}" for words in lines)


def _row(finding: Finding) -> list[str]:
    seeds = f"{finding.seeds} seed" + ("s" if finding.seeds > 1 else "")
    distance = "" if finding.distance is None else f" ({finding.distance:+.2f})"
    claim, theirs, command = _missing_row(finding)
    ours = f"**{finding.ours}**{distance}, {seeds}, [{finding.heading}]({finding.study}/index.md)"
    return [finding.verdict, claim, finding.claim.model, theirs, ours, command]


def _missing_row(finding: Finding) -> list[str]:
    command = finding.command.replace(f"{provenance.PROGRAM} ", "")
    claim = f"{finding.claim.claim} ({_place(finding.claim)})"
    return [claim, finding.theirs, f"`{command}`"]


def _place(claim: Claim) -> str:
    return f"{claim.paper}, {claim.where}"
