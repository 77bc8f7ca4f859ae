"""`python -m bench.gpu`: see run.py."""

import signal
import sys

from bench.gpu.run import main

# As ctrl-C does: the check under way is stopped and its files are removed.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
sys.exit(main())
