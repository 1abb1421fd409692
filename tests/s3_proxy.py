"""A network that fails: a proxy in front of the S3 server, which cuts answers off as a test says."""

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
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            asked = threading.Event()  # a request whose answer has not begun; connections are used again
            threading.Thread(target=self._requests, args=(client, server, asked), daemon=True).start()
            threading.Thread(target=self._answers, args=(client, server, asked), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket, asked: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
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

    @staticmethod
    def _cut(*sockets: socket.socket) -> None:
        for end in sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
