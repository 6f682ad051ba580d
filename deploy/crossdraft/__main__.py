"""`python -m crossdraft`: the console script."""

from crossdraft.cli.__main__ import main

main()
