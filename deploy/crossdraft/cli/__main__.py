"""`python -m crossdraft.cli`: the command without its script, as for the services that a command starts."""

from crossdraft.cli.app import main

main()
