"""`python -m bench.offload`; run.py has the command line."""

import sys

from bench.offload.run import main

if __name__ == "__main__":
    sys.exit(main())
