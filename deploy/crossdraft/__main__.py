"""The console script, also as `python -m crossdraft`."""

import signal

# Until a command says what a signal is to end, Ctrl-C ends the process at once, also where libraries are imported.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it is not ignored
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from crossdraft.cli.app import main as main

if __name__ == "__main__":
    main()
