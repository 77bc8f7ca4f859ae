"""`python -m bench.resilience`; run.py has the command line."""

import signal
import sys

from bench.resilience.run import main

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # with all that was started
    sys.exit(main())
