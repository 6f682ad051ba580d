"""`python -m crossdraft`."""

from crossdraft.cli.__main__ import main

if __name__ == "__main__":
    main()
