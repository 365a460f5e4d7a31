"""The output of `ownerwise plan --advise`: a table and a picture in one screen, or an HTML page."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence

from ownerwise.planning import Advice
from ownerwise.planning.usefulness import LEAST_SIGNAL

_SHADES = " ░▒▓█"
_COLOURS = ("#f5f7f9", "#d7e9ec", "#9fcfd6", "#55a5b1", "#0b6e7d")
_NO_PLAN = "no plan"
_MEANING = (
    "Noise is the noise multiplier. Signal is how far all steps together could move the model if "
    "all gradients agreed, in standard deviations of the noise: below "
    f"{LEAST_SIGNAL:g}, a plan is of no use; how much more a model needs depends on the data."
)


def advice_text(advice: Advice) -> str:
    """Return the advice as text for a terminal of 80 columns."""
    steps = [str(cell.steps) for cell in advice.cells[0]]
    most = _most(advice)
    lines = [
        f"Method {advice.method}, {advice.total} {advice.drawn}: noise / signal",
        "for each expected batch (rows) and number of steps (columns)",
        f"{'batch':>9} " + "".join(f"{count:>13}" for count in steps),
    ]
    for row in advice.cells:
        cells = [f"{_cell_words(cell.noise_multiplier, cell.signal):>13}" for cell in row]
        lines.append(f"{row[0].batch_size:>9g} " + "".join(cells))
    lines += ["", "Signal, from blank (none) to full (the most in this table):"]
    for row in advice.cells:
        shades = [4 * " " + 9 * _SHADES[_level(cell.signal, most, len(_SHADES))] for cell in row]
        lines.append(f"{row[0].batch_size:>9g} " + "".join(shades))
    for words in (*_conclusions(advice), _MEANING):
        lines += ["", *textwrap.wrap(words, 79)]
    return "\n".join(lines)


def advice_html(advice: Advice) -> str:
    """Return the advice as a page with the same table, coloured by the signal."""
    most = _most(advice)
    rows = []
    for row in advice.cells:
        cells = []
        for cell in row:
            level = _level(cell.signal, most, len(_COLOURS))
            ink = "#ffffff" if level == len(_COLOURS) - 1 else "#1c2733"
            words = html.escape(_cell_words(cell.noise_multiplier, cell.signal))
            best = " class=best" if cell == advice.best else ""
            cells.append(f"<td{best} style='background:{_COLOURS[level]};color:{ink}'>{words}</td>")
        rows.append(f"<tr><th>{row[0].batch_size:g}</th>{''.join(cells)}</tr>")
    head = "".join(f"<th>{cell.steps}</th>" for cell in advice.cells[0])
    notes = "".join(f"<p>{html.escape(line)}</p>" for line in (*_conclusions(advice), _MEANING))
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width'><title>What these budgets allow</title>"
        "<style>body{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:2rem auto;"
        "padding:0 1rem;color:#1c2733}table{border-collapse:collapse;width:100%}"
        "th,td{padding:.5rem;text-align:right;font-variant-numeric:tabular-nums}"
        ".best{outline:3px solid #c4451c}</style>"
        f"<h1>What these budgets allow</h1><p>Method {html.escape(advice.method)}, "
        f"{advice.total} {advice.drawn}. Noise / signal for each expected batch (rows) and number "
        f"of steps (columns).</p><table><tr><th></th>{head}</tr>{''.join(rows)}</table>{notes}"
        "</html>\n"
    )


def _most(advice: Advice) -> float:
    return max((cell.signal or 0.0 for row in advice.cells for cell in row), default=0.0)


def _level(signal: float | None, most: float, levels: int) -> int:
    return 0 if not signal or not most else min(levels - 1, int(levels * signal / most))


def _cell_words(noise: float | None, signal: float | None) -> str:
    return _NO_PLAN if noise is None or signal is None else f"{_number(noise)} / {_number(signal)}"


def _number(value: float | None) -> str:
    """Return a number with three digits, and without an exponent."""
    assert value is not None
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _conclusions(advice: Advice) -> Sequence[str]:
    best = advice.best
    if best is None:
        return ["These budgets allow none of these plans: use larger budgets, or fewer steps."]
    lines = [
        f"Try --steps {best.steps} --batch-size {best.batch_size:g}: noise "
        f"{_number(best.noise_multiplier)}, signal {_number(best.signal)}, for the least work near "
        "the largest signal."
    ]
    if advice.useless:
        lines = [
            "OF NO USE: with these budgets, no plan of this method lets a model learn anything "
            f"(signal at most {_most(advice):.2g})."
        ]
    others = ", ".join(f"{name} {_number(signal)}" for name, signal in advice.others.items())
    return [*lines, f"Signal there, if something were different: {others}."]
