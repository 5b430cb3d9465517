"""What `deploy/` starts exists, and its Redis keeps its password and its data."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from redis.exceptions import AuthenticationError

from streamrl.errors import ConfigError
from streamrl.queues import open_ledgers
from streamrl.queues.connection import open_to_look
from streamrl.queues.supervision import Supervision
from streamrl.runfile import load, save
from streamrl.runtime.control import publish
from streamrl.weight_sync.files import make_token
from tests.cli.run_kit import cli, command
from tests.needs import need_programs
from tests.redis_kit import ForeignRedis, Probe, Secured, tear_script

ROOT = Path(__file__).parent.parent
SERVICES = yaml.safe_load((ROOT / "deploy" / "compose" / "compose.yaml").read_text())["services"]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()


@pytest.mark.parametrize("engine", ["compose", "kubernetes", "slurm"])
def test_what_deploy_holds_is_what_render_writes(engine: str, tmp_path: Path):
    """`make deploy` after a change of the renderers; it runs these commands."""
    (tmp_path / "deploy").mkdir()
    shutil.copy(ROOT / "deploy" / "run.yaml", tmp_path / "deploy")
    [command_line] = re.findall(rf"\(BIN\)/streamrl (render {engine} .*)", (ROOT / "Makefile").read_text())
    done = cli(*shlex.split(command_line), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    written, kept = (
        {path.relative_to(folder): path.read_text() for path in (folder / "deploy" / engine).rglob("*.*")}
        for folder in (tmp_path, ROOT)
    )
    assert written
    assert written == {path: text for path, text in kept.items() if "secrets" not in path.parts}


def test_volumes_are_mounted_where_the_user_of_the_image_may_write():
    [(user, words)] = re.findall(r"install -d -o (\w+) -g \w+ (.*)", DOCKERFILE)
    assert f"--uid 1000 {user}" in DOCKERFILE
    assert "USER 1000\n" in DOCKERFILE
    mounted = {volume for name, service in SERVICES.items() if name != "redis" for volume in service["volumes"]}
    assert {target for source, target, *_ in (one.split(":") for one in mounted) if source == "runs"} == {words}
    assert mounted - {f"runs:{words}"} == {"..:/work:ro"}


def test_the_image_has_what_rewards_and_reading_commands_can_need():
    extras = ",".join(re.findall(r"'[\w./]+\[([\w,-]+)\]'", DOCKERFILE))
    tested, _for_the_site = re.findall(r"'\.\[([\w,-]+)\]'", (ROOT / "Makefile").read_text())
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= set(known)
    # Redis has a container of its own.
    assert set(tested.split(",")) - {"embedded", "dev"} == set(extras.split(","))


class Container(ForeignRedis):
    """The server of the compose file: the same shell line with other paths, and a port of its own."""

    def start(self, **_: str) -> None:
        line = SERVICES["redis"]["command"][2].replace(str(16 << 30), "64mb").replace("$$", "$")
        for inside, outside in (("/run/secrets/redis-password", self.password_file), ("/data", self.folder)):
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


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Secured]:
    need_programs("redis-server", "openssl")
    redis = Secured(tmp_path / "secured", Path("redis-server"))
    redis.start()
    yield redis
    redis.kill()


async def test_a_worker_does_all_and_an_observer_only_looks(secured: Secured, tmp_path: Path):
    flags = ["name=secured", f"redis.url={secured.url}", f"redis.password_file={secured.password_file}"]
    loaded = load(None, [*flags, "weights.transport=http"], {})
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    save(loaded, run_dir / "run.json")
    make_token(run_dir)
    await publish(loaded.config, run_dir)
    async with open_ledgers(loaded.config, run_dir) as ledgers:
        await ledgers.train.admit(
            cursor=0, fingerprint="f", prompt=b"p", samples=2, min_group=2, budget=8, hard_cap=16, max_dead=1, version=0
        )
        supervision = Supervision(ledgers.connection, "secured")
        await supervision.beat({"id": "a", "pid": "1", "host": "h", "states": "{}", "members": "[]"})
        await supervision.add_lines({"learner.0": [b'{"event": "hello"}']})
        assert (await supervision.published()).weights_token
        with pytest.raises(ConfigError, match="NOPERM"):
            await ledgers.connection.read("FLUSHALL")
    observed = loaded.config.redis.model_copy(
        update={"url": secured.url.replace("worker@", "observer@"), "password_file": secured.folder / "observer"}
    )
    async with open_to_look(observed, str(observed.url)) as looking:
        for words in (("CLIENT", "KILL", "TYPE", "normal"), ("CLIENT", "PAUSE", "1000"), ("FLUSHDB",)):
            with pytest.raises(ConfigError, match="NOPERM"):
                await looking.read(*words)
    far = ["--run", secured.url.replace("worker@", "observer@") + "#secured"]
    env = {"STREAMRL_REDIS__PASSWORD_FILE": str(secured.folder / "observer")}
    assert (await command("lag", *far, env=env)).returncode == 0
    worker = {"STREAMRL_REDIS__PASSWORD_FILE": str(secured.password_file)}
    assert (await command("lag", "--run", f"{secured.url}#secured", env=worker)).returncode == 0
    assert "secured" in (await command("status", *far, env=env)).stdout
    assert "hello" in (await command("logs", *far, env=env)).stdout
    for words in (["scale", "rollout=2"], ["down"]):
        refused = await command(*words, *far, env=env)
        assert refused.returncode == 78, refused.stderr
        assert "NOPERM" in refused.stderr
    joined = await command("run", "reward", *far, env=env)
    assert joined.returncode == 78, "the token of the weights is not for observers"
    assert "worker" not in joined.stderr.replace("worker@", "")
    wrong = await command("lag", *far, env={"STREAMRL_REDIS__PASSWORD_FILE": str(secured.folder / "worker")})
    assert wrong.returncode == 78


def test_the_image_is_written_as_a_linter_wants_it():
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [hadolint, "--ignore", "DL3013", ROOT / "deploy" / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
