"""Several hosts on this machine: a network namespace each, joined by a bridge, so that a host can be cut off."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final, Self

from tests.needs import missing, need_programs

BRIDGE: Final = "srl-bridge"
HERE: Final = "10.77.0.1"
"""This machine, as the hosts reach it."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


class Host:
    """A network of its own, and a working directory of its own; files are those of this machine."""

    def __init__(self, number: int, folder: Path) -> None:
        self.name, self.address = f"srl-host{number}", f"10.77.0.{number}"
        self.folder = folder / self.name
        self.folder.mkdir(parents=True)
        self._link = f"srl-veth{number}"
        self.processes: list[subprocess.Popen[bytes]] = []
        ip("netns", "add", self.name)
        ip("link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        ip("link", "set", self._link, "master", BRIDGE, "up")
        for words in (
            ("addr", "add", f"{self.address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
            ("route", "add", "default", "via", HERE),
        ):
            ip("-n", self.name, *words)

    def streamrl(self, *words: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a command of streamrl on this host; it prints into `output` of its folder."""
        return self._start([sys.executable, "-m", "streamrl", *words], self.folder, env or {})

    def shell(self, program: str, folder: Path) -> subprocess.Popen[bytes]:
        """The same for a program of bash, which ends at its first error."""
        return self._start(["bash", "-euc", program], folder, {})

    def _start(self, words: list[str], folder: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
        command = ["ip", "netns", "exec", self.name, *words]
        with (self.folder / "output").open("ab") as out:
            process = subprocess.Popen(
                command, cwd=folder, env={**os.environ, **env}, stdout=out, stderr=out, process_group=0
            )
        self.processes.append(process)
        return process

    def cut(self) -> None:
        """Take the cable out."""
        ip("link", "set", self._link, "down")

    def join(self) -> None:
        """Put it in again."""
        ip("link", "set", self._link, "up")

    def block(self, other: Host, port: int) -> None:
        """Drop what this host answers to `other` on a port, as a firewall does."""
        ip("-n", self.name, "rule", "add", "to", other.address, "ipproto", "tcp", "sport", str(port), "blackhole")

    def unblock(self, other: Host, port: int) -> None:
        """Open the port again."""
        ip("-n", self.name, "rule", "del", "to", other.address, "ipproto", "tcp", "sport", str(port), "blackhole")

    def ask(self, *words: str, env: dict[str, str] | None = None) -> str:
        """Run a command of streamrl on this host to its end; return what it prints."""
        command = ["ip", "netns", "exec", self.name, sys.executable, "-m", "streamrl", *words]
        environment = {**os.environ, **(env or {})}
        return subprocess.run(
            command, check=False, stdout=subprocess.PIPE, text=True, env=environment, timeout=60
        ).stdout

    def crash(self) -> None:
        """Power off, with the cable out: nobody hears that its processes end."""
        self.cut()
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self.processes.clear()

    def close(self) -> None:
        self.crash()
        ip("link", "del", self._link)  # the kernel takes its time to do so with the namespace
        ip("netns", "del", self.name)

    def said(self) -> str:
        file = self.folder / "output"
        return file.read_text(errors="replace") if file.exists() else ""


class Hosts:
    """Makes hosts; they and their bridge are gone at the end of the block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.made: list[Host] = []

    def __enter__(self) -> Self:
        need_programs("ip")
        try:
            ip("link", "add", BRIDGE, "type", "bridge")
        except subprocess.CalledProcessError as error:
            missing(f"this kernel makes no networks for this user: {error.stderr.decode().strip()}")
        for left in _namespaces():  # the bridge is ours, so a test that was killed has left them
            ip("netns", "del", left)
        ip("addr", "add", f"{HERE}/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.made:
            host.close()
        ip("link", "del", BRIDGE)

    def add(self) -> Host:
        host = Host(len(self.made) + 2, self._folder)
        self.made.append(host)
        return host


def _namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True, timeout=30).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith("srl-host")]
