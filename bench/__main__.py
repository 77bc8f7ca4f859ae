"""`python -m bench`: see run.py."""

import sys

from bench.run import main

sys.exit(main())
