"""`python -m packckpt`: the same command line as `packckpt`."""

import sys

from packckpt.cli import main

sys.exit(main())
