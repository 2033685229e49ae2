"""Runs a module of ours whose output nobody hears: python -m tests.unheard HOW MODULE [ARGUMENT…].

HOW is `closed`, `broken` (a pipe that nobody reads), or the path of a file to write to.
"""

import os
import sys


def cut_off(how: str) -> None:
    """Put something else in place of standard output and standard error."""
    if how == "closed":
        os.close(1)
        os.close(2)
        return
    if how == "broken":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open(how, os.O_WRONLY | os.O_APPEND)
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    os.close(writer)


if __name__ == "__main__":
    how, *command = sys.argv[1:]
    cut_off(how)
    os.execv(sys.executable, [sys.executable, "-m", *command])  # noqa: S606
