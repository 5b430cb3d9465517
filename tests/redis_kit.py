"""A real Redis server in a run directory, that tests kill, pause and restart."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Self

from redis.connection import Connection, parse_url
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from streamrl.config import RedisConfig
from streamrl.queues import embedded
from streamrl.servers.process import take_port

_DEPLOYED: Final = Path(__file__).parents[1] / "deploy" / "redis"


class Probe:
    """A plain, synchronous connection, which neither loads scripts nor has an append-only file written anew."""

    def __init__(self, url: str, password_file: Path | None = None) -> None:
        options: dict[str, Any] = dict(parse_url(url))
        if password_file is not None:
            options["password"] = password_file.read_text().strip()
        kind = options.pop("connection_class", Connection)
        self._connection = kind(**options, socket_timeout=10, socket_connect_timeout=5, protocol=2)
        self._connection.connect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket; a second call does nothing."""
        self._connection.disconnect()

    def pipeline(self, commands: Sequence[Sequence[str | bytes | float]]) -> list[Any]:
        """Replies of all commands, as they come; an error reply stands in its place."""
        self._connection.send_packed_command(self._connection.pack_commands(commands))
        return [self._reply() for _ in commands]

    def call(self, *command: str | bytes | float) -> Any:
        """The reply of one command; an error reply is raised."""
        (reply,) = self.pipeline([command])
        if isinstance(reply, ResponseError):
            raise reply
        return reply

    def _reply(self) -> Any:
        try:
            return self._connection.read_response()
        except ResponseError as error:
            return error


class RedisRun:
    """A run directory with its own Redis server (append-only file, everysec), as `streamrl up` starts it."""

    def __init__(self, run_dir: Path, server: embedded.ServerProgram | None = None) -> None:
        self.run_dir = run_dir
        self.server = server
        self.config = RedisConfig(
            url=f"unix://{embedded.socket_path(run_dir)}", patience=20.0, maxmemory=256 << 20, fsync_period=0.001
        )
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Check the append-only file, start the server, return when it answers."""
        making = embedded.command(self.config, self.run_dir, self.server)
        with ThreadPoolExecutor(1) as thread:  # tests call this in a running event loop too
            what = thread.submit(asyncio.run, making).result()
        self.process = subprocess.Popen(what.argv, executable=what.executable, env=what.env, process_group=0)
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
        """Kill -9; the socket file stays, as after a real crash.

        A child that rewrites the append-only file goes too: that of Redis 6.2 would wait for its parent for five
        seconds, with the connections of the clients in its hands, and write into a folder that is being removed.
        """
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
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


def tear_script(probe: Probe, folder: Path, kill: Callable[[], None]) -> None:
    """Write a key and a script of three writes, kill Redis, and cut its file in the middle of the second of them."""
    second = b"$1\r\nb\r\n"
    with probe:
        probe.call("SET", "before", 1)
        probe.call("EVAL", "for _, k in ipairs({'a', 'b', 'c'}) do redis.call('SET', k, 1) end", 0)
    end = time.monotonic() + 20
    while not (files := [file for file in folder.rglob("*.aof") if second in file.read_bytes()]):
        assert time.monotonic() < end, "a write waits for a running fsync, but not that long"
        time.sleep(0.01)
    kill()
    os.truncate(files[0], files[0].read_bytes().rindex(second) + 4)


def free_port() -> int:
    with take_port() as taken:
        return int(taken.getsockname()[1])


class ForeignRedis:
    """A server that somebody else runs: TCP and a password; nobody checks its append-only file before a start."""

    PASSWORD = 'a "secret" \\ of theirs'

    def __init__(self, folder: Path, executable: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.executable = executable
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.password_file = folder / "password"
        self.password_file.write_text(f"{self.PASSWORD}\n")
        self.config = RedisConfig(url=self.url, password_file=self.password_file, patience=20.0, fsync_period=0.001)
        self.process: subprocess.Popen[bytes] | None = None

    def probe(self) -> Probe:
        """A connection to it."""
        return Probe(self.url, self.password_file)

    def start(self, **options: str) -> None:
        """Start the server and return when it answers."""
        quoted = self.PASSWORD.replace("\\", "\\\\").replace('"', '\\"')
        # With "no" every write is in the file before its reply; "everysec" waits for an fsync that runs.
        options = {"appendonly": "yes", "appendfsync": "no", "save": "", **options}
        words = [part for key, value in options.items() for part in (f"--{key}", value)]
        self.process = subprocess.Popen(
            ["redis-server", "-", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder), *words],
            executable=self.executable,
            stdin=subprocess.PIPE,
            stdout=(self.folder / "redis.log").open("wb"),
        )
        assert self.process.stdin is not None
        with self.process.stdin as stdin:
            stdin.write(f'requirepass "{quoted}"\n'.encode())
        self.wait_ready()

    def wait_ready(self) -> None:
        """Return when it answers."""
        end = time.monotonic() + 20
        while True:
            assert self.process is not None
            assert self.process.poll() is None, (self.folder / "redis.log").read_text()
            try:
                with self.probe() as probe:
                    probe.call("PING")
                    return
            except RedisConnectionError:
                assert time.monotonic() < end, "redis did not answer PING within 20 s"
                time.sleep(0.005)

    def kill(self) -> None:
        """Kill -9."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Secured(ForeignRedis):
    """The server of `deploy/redis/`: TLS only, users with rights; other paths and passwords."""

    def start(self, **_: str) -> None:
        """Make its certificate and users, start it, and return when it answers; `url` is that of a worker."""
        for words in (
            "req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.crt -days 2 -subj /CN=ca",
            (
                "req -newkey rsa:2048 -nodes -keyout redis.key -out redis.csr -subj /CN=redis -addext"
                " subjectAltName=DNS:localhost"
            ),
            "x509 -req -in redis.csr -CA ca.crt -CAkey ca.key -out redis.crt -days 2 -copy_extensions copy",
        ):
            subprocess.run(["openssl", *words.split()], cwd=self.folder, check=True, capture_output=True)
        users = (_DEPLOYED / "users.acl").read_text()
        for user in ("worker", "observer"):
            password = hashlib.sha256(user.encode()).hexdigest()
            users = users.replace(f"user {user} on #{'0' * 64}", f"user {user} on #{password}")
            (self.folder / user).write_text(user)
        (self.folder / "users.acl").write_text(users)
        text = (_DEPLOYED / "redis.conf").read_text()
        text = text.replace("/etc/redis/tls", str(self.folder)).replace("/etc/redis", str(self.folder))
        text = text.replace("/var/lib/redis", str(self.folder)).replace("tls-port 6379", f"tls-port {self.port}")
        (self.folder / "redis.conf").write_text(text)
        log = (self.folder / "redis.log").open("ab")
        self.process = subprocess.Popen([self.executable, self.folder / "redis.conf"], stdout=log, stderr=log)
        self.url = f"rediss://worker@localhost:{self.port}/0?ssl_ca_certs={self.folder / 'ca.crt'}"
        self.password_file = self.folder / "worker"
        self.wait_ready()
