"""A run whose roles are on several hosts that share no run directory, and what its tests ask of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from tests.cli.run_kit import UNHURRIED, cli, data_of
from tests.hosts_kit import Host, Hosts
from tests.redis_kit import ForeignRedis
from tests.waits import until

CENTRAL = ("learner", "feeder", "reward")


class Spread:
    """Learner, feeder and reward worker on one host, replicas on others that join by the URL of Redis."""

    def __init__(
        self, run_file: Path, redis: ForeignRedis, hosts: Hosts, *settings: str, roles: Sequence[str] = CENTRAL
    ) -> None:
        self.env = {"STREAMRL_REDIS__PASSWORD_FILE": str(redis.password_file)}
        self.far = ["--run", f"{redis.url}#tiny"]
        self.center = hosts.add()
        self.run_dir = self.center.folder / "runs" / "tiny"
        shared = [f"redis.url={redis.url}", f"redis.password_file={redis.password_file}", "weights.transport=http"]
        shared += ["weights.host=0.0.0.0", "learner.steps=100000", "evaluation.every=0", "lease.seconds=3"]
        shared += [UNHURRIED]
        flags = [word for setting in (*shared, *settings) for word in ("--set", setting)]
        prepared = self.center.streamrl("up", str(run_file), "--prepare", *flags)
        assert prepared.wait(60) == 0, self.center.said()
        for kind in roles:
            self.center.streamrl("run", kind, "--run", str(self.run_dir))

    def replica(self, host: Host, **env: str) -> None:
        host.streamrl("run", "rollout", *self.far, "--index", "auto", env=self.env | env)

    def roles(self) -> dict[str, dict[str, Any]]:
        return {role["name"]: role for role in self._asked("status")["roles"]}

    def replicas(self) -> dict[str, dict[str, Any]]:
        """By the name of the role, those that send heartbeats."""
        return {name: role for name, role in self.roles().items() if "rollout" in name and role["pid"]}

    def lag(self) -> dict[str, Any]:
        return self._asked("lag")

    def _asked(self, word: str) -> dict[str, Any]:
        done = cli(word, "--json", *self.far, env=self.env)
        assert done.stdout, done.stderr
        found: dict[str, Any] = data_of(done.stdout, f"streamrl.{word}/1")
        return found

    def look(self, command: str, host: Host, **env: str) -> dict[str, Any]:
        """What `status` or `lag` says on another host."""
        said = host.ask(command, "--json", *self.far, env=self.env | env)
        found: dict[str, Any] = orjson.loads(said)["data"]
        return found

    def steps(self) -> int:
        return int(self.lag()["version"])

    def goes_on(self, more: int = 5) -> float:
        """Wait for more steps; return their number per second."""
        begun, at = self.steps(), time.monotonic()
        until(lambda: self.steps() >= begun + more, "the learner goes on")
        return (self.steps() - begun) / (time.monotonic() - at)

    def drain(self) -> dict[str, Any]:
        """End the roles of the first host, and return what the audit finds."""
        for process in reversed(self.center.processes):
            process.terminate()
        for process in self.center.processes:
            assert process.wait(60) in {0, -15, 143}, self.center.said()
        found: dict[str, Any] = data_of(
            cli("audit", "--json", "--run", str(self.run_dir), env=self.env).stdout, "streamrl.audit/2"
        )
        return found
