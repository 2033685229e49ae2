"""Runs a module of another build of ours: python -m tests.earlier FOLDER MODULE ARGUMENTS."""

import os
import sys

if __name__ == "__main__":
    os.chdir(sys.argv[1])
    # What that build runs is not this one's to be covered.
    environ = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE_")}  # noqa: TID251
    os.execve(sys.executable, [sys.executable, "-m", *sys.argv[2:]], environ)  # noqa: S606
