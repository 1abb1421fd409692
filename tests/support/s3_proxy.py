"""A network that fails: a proxy in front of the S3 server, which cuts, forgets or refuses connections when told."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable


class Proxy:
    """Passes bytes on between clients and a server. What is put into `faults` happens to the next answers, in order.

    A fault is a number of bytes: so much of the answer is let through, then the connection is cut.
    """

    def __init__(self, port: int) -> None:
        self.faults: list[int] = []
        self.before_cut: Callable[[], object] = lambda: None
        self.num_connections = 0
        self._forgotten = 0
        self._away = False
        self._open: set[socket.socket] = set()
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def forget(self) -> None:
        """No byte passes through the connections that are open now; later ones work."""
        self._forgotten = self.num_connections

    def go_away(self) -> None:
        """Every connection is cut, and those that come are, until `come_back`."""
        self._away = True
        for end in list(self._open):
            self._cut(end)

    def come_back(self) -> None:
        self._away = False

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._away:
                self._cut(client)
                continue
            number, self.num_connections = self.num_connections, self.num_connections + 1
            server = socket.create_connection(("127.0.0.1", self._target))
            self._open |= {client, server}
            asked = threading.Event()  # a request whose answer has not begun; connections are used again
            threading.Thread(target=self._requests, args=(client, server, asked, number), daemon=True).start()
            threading.Thread(target=self._answers, args=(client, server, asked), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket, asked: threading.Event, number: int) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                if number < self._forgotten:
                    continue
                if data.startswith((b"GET /", b"HEAD /", b"PUT /", b"POST /", b"DELETE /")):
                    asked.set()
                server.sendall(data)
        self._cut(client, server)

    def _answers(self, client: socket.socket, server: socket.socket, asked: threading.Event) -> None:
        allowed: int | None = None
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                if not data.startswith(b"HTTP/1.1 100") and asked.is_set():
                    asked.clear()
                    allowed = self.faults.pop(0) if self.faults else None
                if allowed is not None:
                    data, allowed = data[:allowed], allowed - len(data[:allowed])
                client.sendall(data)
                if allowed == 0:
                    self.before_cut()
                    break
        self._cut(client, server)

    def _cut(self, *sockets: socket.socket) -> None:
        for end in sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
            self._open.discard(end)
