"""Private training where every data owner sets an own privacy budget."""

__version__ = "0.1.0"
