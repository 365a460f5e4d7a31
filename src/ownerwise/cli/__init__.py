"""The command line, one file per command.

May import every other room. A command's file imports them inside the functions that need them, to
keep `ownerwise --help` fast.
"""
