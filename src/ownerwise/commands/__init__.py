"""Commands of the command line, one module each: `add(commands)` makes its parser."""
