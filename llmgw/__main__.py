"""`python -m llmgw` and the zipapp's entry: the command line, nothing else."""

from __future__ import annotations

import sys

from llmgw.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
