"""`python -m bench.ranks`: see run.py."""

import sys

from bench.ranks.run import main

sys.exit(main())
