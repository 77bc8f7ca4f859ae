"""`python -m bench.resilience`; run.py has the command line."""

import sys

from bench.resilience.run import main

if __name__ == "__main__":
    sys.exit(main())
