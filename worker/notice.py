"""What a service manager is told by a worker or a sweeper, where there is one."""

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Notice:
    """What a service manager is told, where there is one."""

    address: str

    @classmethod
    def of_service(cls) -> Self:
        """Take the address out of the environment, so that no child speaks for the service."""
        return cls(os.environ.pop("NOTIFY_SOCKET", ""))  # noqa: TID251 - the manager's, no setting

    def send(self, state: str) -> None:
        """Tell it, if it listens."""
        if not self.address:
            return
        address = f"\0{self.address[1:]}" if self.address.startswith("@") else self.address
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
            link.sendto(state.encode(), socket.MSG_DONTWAIT, address)
