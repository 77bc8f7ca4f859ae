"""`python -m statehold`: the same as the command `statehold`."""

import sys

from statehold.cli import main

if __name__ == "__main__":
    sys.exit(main())
