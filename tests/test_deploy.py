"""What `deploy/` starts exists, and its Redis keeps its password and its data."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from redis.exceptions import AuthenticationError

from streamrl.config import RunConfig
from streamrl.runtime.roles import KINDS
from tests.needs import need_programs
from tests.redis_kit import ForeignRedis, Probe, tear_script

ROOT = Path(__file__).parent.parent
SERVICES = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
ROLES = {name: service for name, service in SERVICES.items() if "run" in service.get("command", [])}
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()


def test_every_role_but_the_server_is_a_service_with_its_own_index():
    started = [(service["command"][1], service["command"][5:]) for service in ROLES.values()]
    # A recorder and a player take the places of others in runs of another kind.
    assert {kind for kind, _ in started} == set(KINDS) - {"redis", "recorder", "player"}
    assert len({(kind, *rest) for kind, rest in started}) == len(started)


def test_the_run_is_prepared_with_keys_that_exist():
    words = SERVICES["prepare"]["command"]
    assert words[0] == "up"
    for key in (word.partition("=")[0] for word in words if "=" in word):
        section, name = key.split(".")
        assert name in RunConfig.model_fields[section].annotation.model_fields


@pytest.mark.parametrize("name", ROLES)
def test_what_is_checked_before_the_start_is_seen_as_the_role_sees_it(name: str):
    for key in ("image", "volumes", "environment", "secrets"):
        assert ROLES[name][key] == SERVICES["prepare"][key]


def test_a_network_that_is_shared_belongs_to_a_service_that_never_ends():
    shared = {name: service["network_mode"] for name, service in SERVICES.items() if "network_mode" in service}
    assert {name.partition("-")[0] for name in shared} == {"reward"}
    assert {"reward-0", "reward-model-judge-0"} == set(shared)
    [owner] = {mode.removeprefix("service:") for mode in shared.values()}
    assert (SERVICES[owner]["restart"], SERVICES[owner]["entrypoint"]) == ("always", ["sleep", "infinity"])


def test_volumes_are_mounted_where_the_user_of_the_image_may_write():
    [(user, words)] = re.findall(r"install -d -o (\w+) -g \w+ (.*)", DOCKERFILE)
    assert f"USER {user}\n" in DOCKERFILE
    mounted = {tuple(volume.split(":")) for service in ROLES.values() for volume in service["volumes"]}
    assert {target for source, target in mounted if not source.startswith(".")} == set(words.split())


def test_the_image_has_what_rewards_and_reading_commands_can_need():
    [extras] = re.findall(r"'\.\[([\w,-]+)\]'", DOCKERFILE)
    tested, _for_the_site = re.findall(r"'\.\[([\w,-]+)\]'", (ROOT / "Makefile").read_text())
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= set(known)
    # Redis has a container of its own; pyarrow comes to the tests with `dev`.
    assert set(tested.split(",")) - {"embedded", "dev"} | {"parquet"} == set(extras.split(","))


class Container(ForeignRedis):
    """The server of the compose file: the same shell line with other paths, and a port of its own."""

    def start(self, **_: str) -> None:
        line = SERVICES["redis"]["command"][2].replace("${REDIS_MEMORY:-4gb}", "64mb").replace("$$", "$")
        for inside, outside in (("/run/secrets/redis_password", self.password_file), ("/data", self.folder)):
            assert inside in line
            line = line.replace(inside, str(outside))
        line = line.replace(" --dir ", f" --port {self.port} --bind 127.0.0.1 --dir ")
        log = (self.folder / "redis.log").open("ab")
        words = [*SERVICES["redis"]["command"][:2], line]
        self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.wait_ready()


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    need_programs("redis-server", "redis-check-aof")
    redis = Container(tmp_path / "volume", Path("redis-server"))
    redis.start()
    yield redis
    redis.kill()


def test_redis_never_evicts_and_its_password_is_in_no_argument(container: Container):
    process = container.process
    assert process is not None
    seen = b"".join(Path(f"/proc/{process.pid}/{name}").read_bytes() for name in ("cmdline", "environ"))
    assert b"redis-server" in seen, "the shell became the server: it gets the signal of `docker stop`"
    assert b"secret" not in seen
    written = [file for file in container.folder.rglob("*") if file.is_file() and b"theirs" in file.read_bytes()]
    assert written == [container.password_file]
    with container.probe() as probe:
        assert probe.call("CONFIG", "GET", "maxmemory-policy") == [b"maxmemory-policy", b"noeviction"]
        assert probe.call("CONFIG", "GET", "maxmemory") == [b"maxmemory", b"67108864"]
    with pytest.raises(AuthenticationError), Probe(container.url) as stranger:
        stranger.call("PING")
    process.terminate()
    assert process.wait(20) == 0


def test_without_a_password_there_is_no_server(container: Container):
    container.kill()
    container.password_file.write_text("\n\n")
    with pytest.raises(AssertionError):
        container.start()
    assert container.process is not None
    assert container.process.wait(20) != 0


def test_a_script_torn_in_the_file_is_never_half_applied(container: Container):
    """Hole 7: the second restart is the one that matters."""
    tear_script(container.probe(), container.folder, container.kill)
    for kept in ([b"before"], [b"before", b"d", b"e"]):
        container.start()
        with container.probe() as probe:
            assert sorted(probe.call("KEYS", "*")) == kept
            probe.call("EVAL", "redis.call('SET','d',1) redis.call('SET','e',1)", 0)
        assert container.process is not None
        container.process.terminate()  # flushes, where kill -9 may lose what waits for an fsync
        assert container.process.wait(20) == 0


def test_the_image_copies_files_that_exist():
    for line in (ROOT / "deploy" / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY"):
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), source
