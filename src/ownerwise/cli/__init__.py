"""The command line, one file per command.

This room may import every other room. Each command imports them inside its functions, which keeps
`ownerwise --help` fast.
"""
