"""The report: an HTML page about one or more runs, and the privacy card for one run.

This subpackage may import any subpackage up to training, but never config or cli.
"""

from ownerwise.report.card import card_text, write_card
from ownerwise.report.held_out import unprotected_owners
from ownerwise.report.page import plotly_script
from ownerwise.report.tuning_line import tuning_line
from ownerwise.report.writing import write_report

__all__ = [
    "card_text",
    "plotly_script",
    "tuning_line",
    "unprotected_owners",
    "write_card",
    "write_report",
]
