"""Lets `python -m kvhost_server` start the daemon."""

import sys

from kvhost_server.cli import main

if __name__ == "__main__":
    sys.exit(main())
