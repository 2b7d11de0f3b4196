"""``python -m bitwitness``."""

import sys

from bitwitness.cli import main

if __name__ == "__main__":
    sys.exit(main())
