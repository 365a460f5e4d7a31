"""Run the command line as `python -m ownerwise`."""

import sys

from ownerwise.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
