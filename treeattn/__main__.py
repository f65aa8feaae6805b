"""``python -m treeattn``."""

import sys

from .cli import main

sys.exit(main())
