"""Prefect's temporary server, started where no other is configured: it ends with this process, however that ends."""

from __future__ import annotations

import subprocess
from typing import Any

from prefect.server.api.server import SubprocessASGIServer

from infra.guard import guard


class _GuardedServer(SubprocessASGIServer):
    def _run_uvicorn_command(self) -> subprocess.Popen[Any]:
        process = super()._run_uvicorn_command()
        guard(process.pid)
        return process


def guard_server() -> None:
    """Before Prefect starts its server: Prefect stops it when Python exits, which a killed process does not."""
    servers = SubprocessASGIServer._instances
    if None not in servers:
        servers[None] = _GuardedServer()
