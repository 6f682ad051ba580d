"""What a process that serves keeps in memory."""

import gc


def settle() -> None:
    """For a process that has loaded what it keeps: from now on Python's collector leaves all of that alone.

    A full collection goes through every object. With a model, its libraries and a vocabulary there are a million of
    them, so that each one was a pause of 240 ms for all that is being served.
    """
    gc.collect()
    gc.freeze()
