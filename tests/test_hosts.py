"""A run on several hosts (network namespaces) that share no run directory.

Hosts are cut off, lost and added; a port is blocked, clocks differ; the guide is followed, with TLS and users.
"""

from __future__ import annotations

import shlex
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from streamrl.queues.embedded import find_server
from tests.cli.conftest import tiny  # noqa: F401  (a fixture)
from tests.cli.run_kit import cli
from tests.docs_kit import ROOT, blocks
from tests.hosts_kit import HERE, Host, Hosts
from tests.hosts_run import Spread
from tests.needs import need_programs
from tests.redis_kit import ForeignRedis
from tests.waits import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
HOUR = 3600


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(tmp_path) as made:
        yield made
        for host in made.made:
            print(f"--- {host.name}\n{host.said()[-4000:]}")


@pytest.fixture
def redis(tmp_path: Path, hosts: Hosts) -> Iterator[ForeignRedis]:
    server = ForeignRedis(tmp_path / "redis", find_server().executable)
    server.start(bind=f"127.0.0.1 {HERE}")
    server.url = f"redis://{HERE}:{server.port}/0"
    yield server
    server.kill()


def test_hosts_are_cut_off_lost_and_added_while_the_run_goes_on(
    tiny: Path,  # noqa: F811
    redis: ForeignRedis,
    hosts: Hosts,
):
    run = Spread(tiny / "run.yaml", redis, hosts)
    first, second = hosts.add(), hosts.add()
    run.replica(first)
    run.replica(second)
    until(lambda: len(run.replicas()) == 2, "both replicas are there")
    until(lambda: all(role["state"] == "ready" for role in run.roles().values()), "all roles work")
    assert None not in {role["version"] for role in run.replicas().values()}
    rates = {"before": run.goes_on()}
    assert not (first.folder / "runs" / "tiny" / "checkpoints").exists(), "it has a run directory of its own"

    first.cut()
    rates["cut off"] = run.goes_on()
    time.sleep(15)  # the length of the outage is what is tested
    run.goes_on()
    first.join()
    until(lambda: len(run.replicas()) == 2, "the host is back")
    back = run.steps()
    until(lambda: all((role["version"] or 0) > back for role in run.replicas().values()), "it has new weights")
    rates["back"] = run.goes_on()

    second.crash()
    # More steps than the budget has groups for: from then on all that is trained comes from the host that was away.
    rates["the other one lost"] = run.goes_on(8)
    third = hosts.add()
    run.replica(third)
    until(lambda: "role ready" in third.said(), "a new host takes part")
    rates["a new one"] = run.goes_on()
    print("steps per second:", {when: round(rate, 2) for when, rate in rates.items()})
    audit = run.drain()
    assert (audit["lost"], audit["twice"]) == (0, 0)
    assert audit["trained"] > 40


def test_a_blocked_port_is_named_and_clocks_an_hour_apart_change_nothing(
    tiny: Path,  # noqa: F811
    tmp_path: Path,
    redis: ForeignRedis,
    hosts: Hosts,
):
    """One host is an hour ahead and cannot reach the port of the weights; the other one is an hour behind."""
    need_programs("cc")
    library = tmp_path / "clock.so"
    source = Path(__file__).parent / "faults" / "clock.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    clocks = {}
    for seconds in (HOUR, -HOUR):
        offset = tmp_path / f"offset{seconds}"
        offset.write_bytes(struct.pack("<q", seconds))
        clocks[seconds] = {"LD_PRELOAD": str(library), "CLOCK_OFFSET_FILE": str(offset)}
    # No lease expires by the load of this machine.
    settings = ["weights.port=8123", "weights.deadline=8", "lease.seconds=30"]
    run = Spread(tiny / "run.yaml", redis, hosts, *settings)
    ahead, behind = hosts.add(), hosts.add()
    run.center.block(ahead, 8123)
    run.replica(ahead, **clocks[HOUR])
    until(lambda: "weights refused" in ahead.said(), "it says that it gets no weights")
    assert f"from http://{run.center.address}:8123, at last: timed out" in ahead.said()
    assert "never retrieved" not in ahead.said()
    assert "weights.port open" in ahead.said()
    [(waiting, role)] = run.replicas().items()
    assert (role["state"], role["version"]) == ("starting", None)

    run.replica(behind, **clocks[-HOUR])
    run.goes_on()
    run.center.unblock(ahead, 8123)
    until(lambda: run.roles()[waiting]["version"] is not None, "the port is open, so it goes on")
    until(lambda: int(run.roles()[waiting]["progress"].get("tokens", 0)) > 0, "it generates")
    run.goes_on()

    for seconds in (0, HOUR, -HOUR):
        looks = [run.look(word, ahead, **clocks.get(seconds, {})) for word in ("status", "lag")]
        ages = [role["up_seconds"] for role in looks[0]["roles"] if role["pid"]]
        for stream in looks[1]["train"]["streams"]:
            ages += [stream[f"{name}_seconds"] or 0 for name in ("oldest_waiting", "oldest_leased", "silent")]
            assert stream["retried"] == 0, "leases hold"
        assert len(ages) == 5 + 3 * 3
        assert all(0 <= age < HOUR / 2 for age in ages), ages
    audit = run.drain()
    assert (audit["lost"], audit["twice"], audit["dead"]) == (0, 0, 0)


def test_the_guide_works_as_it_stands_with_tls_and_users(
    tiny: Path,  # noqa: F811
    tmp_path: Path,
    hosts: Hosts,
):
    """Each host runs its commands of the page, with other paths. A wrong URL of Redis is told how to become right."""
    need_programs("redis-server", "redis-check-aof", "openssl")
    queue, train, other = hosts.add(), hosts.add(), hosts.add()
    places = {"DNS:queue.example": f"IP:{queue.address}", "queue.example": queue.address}
    for place in ("/etc/redis", "/etc/streamrl", "/var/lib/redis"):
        places[place] = str(tmp_path / place.replace("/", "-"))

    def here(text: str) -> str:
        for place, ours in places.items():
            text = text.replace(place, ours)
        return text

    page = "docs/guides/several-hosts.md"
    install, certify, serve, learn, rank, join, look = [
        here(block.text) for block in blocks("bash") if block.page == page
    ]
    [run_file] = [yaml.safe_load(here(block.text)) for block in blocks("yaml") if block.page == page]
    assert queue.shell(install, ROOT).wait(60) == 0, queue.said()
    configuration = Path(places["/etc/redis"]) / "redis.conf"
    configuration.write_text(here(configuration.read_text()))
    assert queue.shell(certify, ROOT).wait(60) == 0, queue.said()
    queue.shell(serve, ROOT)

    shutil.copytree(tiny, train.folder, dirs_exist_ok=True)
    settings = {**yaml.safe_load((tiny / "run.yaml").read_text()), **run_file, "name": "my-run"}
    settings["learner"]["steps"] = 10**5
    settings["evaluation"] = {"every": 0}
    (train.folder / "run.yaml").write_text(yaml.safe_dump(settings))
    prepare, *roles = [shlex.split(line) for line in learn.splitlines()]
    until(lambda: train.streamrl(*prepare[1:]).wait(60) == 0, "the run is prepared as soon as Redis is there")
    for role in roles:
        train.streamrl(*role[1:])
    setting, command = join.replace("\\\n", "").splitlines()
    name, _, value = setting.removeprefix("export ").partition("=")
    other.streamrl(*shlex.split(command)[1:], env={name: value})
    until(lambda: "role ready" in other.said(), "a host joins")

    password = {name: value}
    _, _, _, url = shlex.split(look)
    *exports, rank_command = rank.replace("\\\n", "").splitlines()
    assert (setting in exports, shlex.split(rank_command)[-1]) == (True, url), "a rank joins as every host does"
    far = ["--run", url]
    until(lambda: cli("status", *far, env=password).returncode == 0, "all roles are at work")
    observer = {name: value.replace("worker", "observer")}
    assert cli("lag", "--run", url.replace("worker@", "observer@"), env=observer).returncode == 0
    bare, options = url.removesuffix("#my-run").split("?")
    for wrong, said in (
        (bare, "?ssl_ca_certs="),
        (bare.replace("rediss", "redis"), "`rediss://` with TLS"),
        (f"{bare}?{options}.none", "ca.crt.none, which cannot be read"),
        (f"{bare}?{options}".replace("worker@", "nobody@"), "redis.password_file"),
    ):
        refused = cli("status", "--run", f"{wrong}#my-run", env=password)
        assert (refused.returncode in {69, 78}, said in refused.stderr) == (True, True), refused.stderr


def test_ranks_on_two_hosts_train_together_and_go_on_on_others(
    tiny: Path,  # noqa: F811
    tmp_path: Path,
    redis: ForeignRedis,
    hosts: Hosts,
):
    """No directory but that of the store is common; a host is lost, and another pair goes on from the store."""
    store = tmp_path / "store"
    settings = ("learner.ranks=2", f"checkpoint.store=file://{store}", "checkpoint.every=2")
    settings += ("redis.patience=8", "learner.collective_deadline=12")
    run = Spread(tiny / "run.yaml", redis, hosts, *settings, roles=("feeder", "reward"))
    run.replica(hosts.add())

    def learn(*pair: Host) -> list[subprocess.Popen[bytes]]:
        env = {**run.env, "STREAMRL_RENDEZVOUS": f"tcp://{pair[0].address}:29500", "GLOO_SOCKET_IFNAME": "eth0"}
        env["RES_OPTIONS"] = "attempts:1 timeout:1"  # no name server answers here
        words = [("--index", "0", "--run", str(run.run_dir)), ("--index", "1", *run.far)]
        return [host.streamrl("run", "learner", *way, env=env) for host, way in zip(pair, words, strict=True)]

    def whole() -> list[str]:
        return sorted(path.parent.name for path in store.rglob("ckpt-*/meta.json"))

    second = hosts.add()
    first_rank, _ = learn(run.center, second)
    until(whole, "a checkpoint is in the store")
    run.goes_on(2)
    assert not list((second.folder / "runs").rglob("ckpt-*")), "no checkpoint on the host of rank 1"
    second.crash()
    assert first_rank.wait(60) in {69, 75}, run.center.said()
    before = whole()
    third = hosts.add()
    ranks = learn(run.center, third)
    until(lambda: whole()[-1] > before[-1], "the next pair goes on")
    run.goes_on(2)
    ranks[0].terminate()
    assert [rank.wait(60) for rank in ranks] == [0, 0], run.center.said() + third.said()
