"""A backend that answers at once with the same vector, in a process of its own."""

import signal
import sys

from tests.fakes import Fake


def main(dimension: int) -> None:
    """Say where it listens, and serve until SIGTERM."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    with Fake(dimension=dimension, constant=True) as fake:
        print(fake.url, flush=True)  # noqa: T201 - how the benchmark learns it
        signal.sigwait({signal.SIGTERM})


if __name__ == "__main__":
    main(int(sys.argv[1]))
