"""Only files of versions leave the host, only to bearers of the token, and not more at a time than is good."""

import asyncio
import resource
import socket
import stat
from pathlib import Path

import aiohttp
import pytest

from streamrl.errors import CannotCreate, ConfigError
from streamrl.listening import own_address, reachable
from streamrl.weight_sync.files import allow_many_files, make_token, read_token
from streamrl.weight_sync.serve import BUSY_HEADER, IDLE_SECONDS, HeldVersions, ShardServer, listen

TOKEN = "0123456789abcdef-token"
DATA = bytes(range(256)) * 64


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "root" / "v-1-2"
    folder.mkdir(parents=True)
    (folder / "shard-00000.safetensors").write_bytes(DATA)
    (folder / "manifest.json").write_bytes(b"{}")
    (folder / "folder").mkdir()
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "root" / "secret").write_text("secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "root" / ".draft-v-1-3").mkdir()
    (tmp_path / "root" / ".draft-v-1-3" / "shard-00000.safetensors").write_bytes(DATA)
    return tmp_path / "root"


@pytest.fixture
async def server(root):
    server = ShardServer(root, TOKEN, limit=2)
    async with listen(server.app(), "127.0.0.1", 0) as server.url:
        yield server


@pytest.fixture
async def session():
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
        yield session


async def test_whole_files_ranges_and_heads(server, session):
    url = f"{server.url}/v-1-2/shard-00000.safetensors"
    async with session.get(url) as answer:
        assert (answer.status, await answer.read()) == (200, DATA)
        assert answer.headers[BUSY_HEADER] == "1"
    async with session.get(url, headers={"Range": "bytes=100-299"}) as answer:
        assert (answer.status, await answer.read()) == (206, DATA[100:300])
        assert answer.headers["Content-Range"] == f"bytes 100-299/{len(DATA)}"
    async with session.get(url, headers={"Range": f"bytes={len(DATA)}-"}) as answer:
        assert answer.status == 416
    async with session.head(f"{server.url}/v-1-2/manifest.json") as answer:
        assert (answer.status, answer.headers[BUSY_HEADER]) == (200, "0")
    assert server.transfers == 0


PATHS = [
    "/v-1-2/../secret",
    "/v-1-2/..%2fsecret",
    "/v-1-2/%2e%2e/secret",
    "/../secret",
    "/%2e%2e/secret",
    "/./secret",
    "/secret",
    "/v-1-2/link",
    "/v-1-2/folder",
    "/v-1-2/",
    "/v-1-2",
    "/v-1-2/none",
    "/v-1-2/manifest.json%00",
    "/v-1-2/a%0ab",
    "/v-1-9/manifest.json",
    "/v-1-%32/../v-1-2/link",
    "/.draft-v-1-3/shard-00000.safetensors",
    "//etc/passwd",
    "/v-1-2//etc/passwd",
]


async def test_nothing_else_leaves(server):
    """Sent as it stands: a client would tidy it up."""
    host, port = server.url.removeprefix("http://").split(":")
    for path in PATHS:
        reader, writer = await asyncio.open_connection(host, int(port))
        request = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nConnection: close\r\n\r\n"
        writer.write(request.encode())
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        assert answer.split(b" ")[1] in (b"404", b"400", b"403"), (path, answer)
        assert b"secret" not in answer
        assert DATA[:100] not in answer


async def test_no_token_no_file(server):
    wrong = ("", "Bearer", "Bearer ", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", "Bearer é")
    async with aiohttp.ClientSession() as session:
        for headers in ({}, *({"Authorization": header} for header in wrong)):
            for path in ("/v-1-2/manifest.json", "/v-1-2/shard-00000.safetensors", "/anything"):
                async with session.get(server.url + path, headers=headers) as answer:
                    assert (answer.status, await answer.read()) == (401, b"401: Unauthorized"), headers


async def test_more_transfers_than_allowed_are_sent_elsewhere(server, root, session):
    big = root / "v-1-2" / "big"
    big.write_bytes(bytes(64 << 20))  # more than the sockets buffer, so that a transfer lasts while nobody reads
    url = f"{server.url}/v-1-2/big"
    first, second = await session.get(url), await session.get(url)
    async with session.get(url) as third:
        assert (third.status, third.headers["Retry-After"], third.headers[BUSY_HEADER]) == (503, "1", "2")
    async with session.get(f"{server.url}/v-1-2/manifest.json") as answer:
        assert answer.status == 200
    assert len(await first.read()) == 64 << 20
    second.close()  # a client that goes away gives its place back
    async with asyncio.timeout(10):
        while server.transfers:  # noqa: ASYNC110  (the server notices in its own time)
            await asyncio.sleep(0.01)
    async with session.get(url) as answer:
        assert answer.status == 200
    first.close()


async def test_a_version_that_is_pulled_outlives_its_removal_and_only_that(server, root, session):
    url = f"{server.url}/v-1-2"
    async with session.get(f"{url}/shard-00000.safetensors", headers={"Range": "bytes=0-9"}) as answer:
        assert await answer.read() == DATA[:10]
    (root / "v-1-2").rename(root / ".draft-gone")
    async with session.get(f"{url}/shard-00000.safetensors", headers={"Range": "bytes=10-"}) as answer:
        assert (answer.status, await answer.read()) == (206, DATA[10:])
    for name in ("link", "folder", "never"):
        async with session.get(f"{url}/{name}") as answer:
            assert answer.status == 404


def test_holding_is_bounded_and_ends_when_nobody_asks(root):
    for version in (3, 4, 5):
        (root / f"v-1-{version}").mkdir()
        (root / f"v-1-{version}" / "a").write_bytes(b"x")
    held = HeldVersions(root)
    held.begin("v-1-3", 0.0)
    fourth = held.begin("v-1-4", 1.0)
    held.end(fourth, 2.0)
    refused = held.begin("v-1-5", 3.0)  # no room: it is served for as long as it is there, and not held
    assert [held.find(f"v-1-{version}", "a", 2.0) is not None for version in (3, 4, 5)] == [True, True, False]
    held.expire(2.0 + IDLE_SECONDS)
    assert [held.find(f"v-1-{version}", "a", 32.0) is not None for version in (3, 4)] == [True, False]
    fifth = held.begin("v-1-5", 40.0)
    held.end(refused, 41.0)  # was never counted
    held.expire(80.0)
    assert held.find("v-1-5", "a", 40.0).read_bytes() == b"x"
    held.end(fifth, 41.0)
    assert held.find("v-1-5", "a", 100.0) is not None
    held.begin("v-1-3", 101.0)  # whoever was told the path of a file a moment ago can still open that file
    assert held.find("v-1-5", "a", 101.0) is not None
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    held.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == open_files - 2
    held.begin("v-1-9", 50.0)  # one that is gone already
    assert held.find("v-1-9", "a", 50.0) is None


def test_a_process_without_descriptors_serves_without_holding(root, file_limit):
    folder = root / "v-1-3"
    folder.mkdir()
    for number in range(40):
        (folder / f"f{number}").write_bytes(b"x")
    held = HeldVersions(root)
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    file_limit(open_files + 20)
    assert held.begin("v-1-3", 0.0) is None
    assert len(list(Path("/proc/self/fd").iterdir())) == open_files
    allow_many_files()
    assert held.begin("v-1-3", 1.0) is not None
    held.close()


@pytest.fixture
def file_limit():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda count: resource.setrlimit(resource.RLIMIT_NOFILE, (count, before[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_a_port_that_is_taken_is_an_error_with_a_hint(root):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotCreate, match=rf"port {port}[^0-9](.|\n)*weights.port"):
            async with listen(ShardServer(root, TOKEN).app(), "127.0.0.1", port):
                pass


async def test_a_relay_on_another_host_than_the_learner_listens_on_its_own_address(root):
    for here in ("127.0.0.1", "0.0.0.0", ""):
        assert own_address(here) == here
    found = own_address("192.0.2.7")  # RFC 5737: of no host
    if found != "192.0.2.7":  # there is a network
        async with listen(ShardServer(root, TOKEN).app(), found, 0) as url:
            assert url.startswith(f"http://{found}:")


def test_a_wildcard_is_no_address_for_others(monkeypatch):
    assert reachable("127.0.0.1") == "127.0.0.1"
    assert reachable("0.0.0.0") not in ("0.0.0.0", "")
    monkeypatch.setattr("socket.gethostbyname", lambda name: "127.0.1.1")  # as Debian sets it up
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            assert reachable("0.0.0.0") == probe.getsockname()[0]
        except OSError:
            assert reachable("0.0.0.0") == "127.0.1.1"  # no network at all


def test_the_token_is_private_and_made_once(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="STREAMRL_WEIGHTS_TOKEN_FILE"):
        read_token(tmp_path)
    token = make_token(tmp_path)
    assert make_token(tmp_path) == token == read_token(tmp_path)
    assert stat.S_IMODE((tmp_path / "weights.token").stat().st_mode) == 0o600
    assert len(token) >= 32
    assert [entry.name for entry in tmp_path.iterdir()] == ["weights.token"]
    (tmp_path / "short").write_text("abc")
    monkeypatch.setenv("STREAMRL_WEIGHTS_TOKEN_FILE", str(tmp_path / "short"))
    with pytest.raises(ConfigError, match="fewer than 16"):
        read_token(tmp_path)
