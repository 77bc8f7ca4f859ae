"""`python -m bench.unchanged`; run.py has the command line."""

import sys

from bench.unchanged.run import main

if __name__ == "__main__":
    sys.exit(main())
