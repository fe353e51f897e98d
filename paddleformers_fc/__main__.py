"""``python -m paddleformers_fc``: the command line, for environments whose scripts are not on the path."""

import sys

from paddleformers_fc.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
