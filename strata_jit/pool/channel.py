"""Messages between the host and a node process: one JSON object a line over a socket pair.

Owns the framing, for both ends. The messages themselves, host to node: init, load, run; node to host:
progress, compiled, loading, loaded, ready, error. The end of the stream says that the other side is gone.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

Message = dict[str, Any]
READ_BYTES = 1 << 16


class Channel:
    """One end. `receive` and `send` may be called from different threads."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._pending = b""

    def fileno(self) -> int:
        """Descriptor to wait on; readable when `receive_ready` has something to do."""
        return self._socket.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message; OSError if the other side is gone."""
        self._socket.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    def receive_ready(self) -> list[Message] | None:
        """Read once; the messages that are complete, perhaps none; None at the end of the stream."""
        try:
            data = self._socket.recv(READ_BYTES)
        except OSError:
            data = b""
        if not data:
            return None
        *lines, self._pending = (self._pending + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """End the stream, also for a process that has inherited this end; idempotent."""
        with suppress(OSError):  # the other side was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
