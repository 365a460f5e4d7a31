"""The command line, with one file per command.

This package may import every other package. Each command imports other packages inside its
functions, which keeps `ownerwise --help` fast.
"""
