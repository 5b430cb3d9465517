"""A real Redis server in a run directory, that tests kill, pause and restart."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

from streamrl.config import RedisConfig
from streamrl.queues import embedded


class RedisRun:
    """A run directory with its own Redis server (append-only file, everysec), as `streamrl up` starts it."""

    def __init__(self, run_dir: Path, server: embedded.Server | None = None) -> None:
        self.run_dir = run_dir
        self.server = server
        self.config = RedisConfig(
            url=f"unix://{embedded.socket_path(run_dir)}", patience=20.0, maxmemory=256 << 20, fsync_period=0.001
        )
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Check the append-only file, start the server, return when it answers."""
        what = embedded.command(self.config, self.run_dir, self.server)
        self.process = subprocess.Popen(what.argv, executable=what.executable, env=what.env)
        end = time.monotonic() + 20
        while not self.alive():
            assert self.process.poll() is None, (self.run_dir / "redis" / "redis.log").read_text()
            assert time.monotonic() < end, "redis did not answer PING within 20 s"
            time.sleep(0.005)

    def alive(self) -> bool:
        """Whether the server answers PING."""
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(2)
            try:
                client.connect(str(embedded.socket_path(self.run_dir)))
                client.sendall(b"PING\r\n")
                return client.recv(64).startswith(b"+PONG")
            except OSError:
                return False

    def stop(self) -> None:
        """SIGTERM: the server flushes and ends."""
        assert self.process is not None
        self.process.terminate()
        self.process.wait(20)

    def kill(self) -> None:
        """Kill -9; the socket file stays, as after a real crash."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def restart(self) -> None:
        """Kill -9 (when alive) and start again on the same files."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """SIGSTOP: the server keeps its sockets and answers nothing."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def wake(self) -> None:
        """SIGCONT after `pause`."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGCONT)
