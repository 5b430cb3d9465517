"""Only files of versions leave the host, and only to bearers of the token."""

import asyncio
import socket
import stat

import aiohttp
import pytest

from streamrl.errors import CannotCreate, ConfigError
from streamrl.listening import own_address, reachable
from streamrl.weight_sync.files import make_token, read_token
from streamrl.weight_sync.serve import listen, weights_app

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
async def url(root):
    async with listen(weights_app(root, TOKEN), "127.0.0.1", 0) as url:
        yield url


@pytest.fixture
async def session():
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
        yield session


async def test_whole_files_ranges_and_heads(url, session):
    file = f"{url}/v-1-2/shard-00000.safetensors"
    async with session.get(file) as answer:
        assert (answer.status, await answer.read()) == (200, DATA)
    async with session.get(file, headers={"Range": "bytes=100-299"}) as answer:
        assert (answer.status, await answer.read()) == (206, DATA[100:300])
        assert answer.headers["Content-Range"] == f"bytes 100-299/{len(DATA)}"
    async with session.get(file, headers={"Range": f"bytes={len(DATA)}-"}) as answer:
        assert answer.status == 416
    async with session.head(f"{url}/v-1-2/manifest.json") as answer:
        assert answer.status == 200


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


async def test_nothing_else_leaves(url):
    """Sent as it stands: a client would tidy it up."""
    host, port = url.removeprefix("http://").split(":")
    for path in PATHS:
        reader, writer = await asyncio.open_connection(host, int(port))
        request = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nConnection: close\r\n\r\n"
        writer.write(request.encode())
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        assert answer.split(b" ")[1] in (b"404", b"400", b"403"), (path, answer)
        assert b"secret" not in answer
        assert DATA[:100] not in answer


async def test_no_token_no_file(url):
    wrong = ("", "Bearer", "Bearer ", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", "Bearer é")
    async with aiohttp.ClientSession() as session:
        for headers in ({}, *({"Authorization": header} for header in wrong)):
            for path in ("/v-1-2/manifest.json", "/v-1-2/shard-00000.safetensors", "/anything"):
                async with session.get(url + path, headers=headers) as answer:
                    assert (answer.status, await answer.read()) == (401, b"401: Unauthorized"), headers


async def test_a_port_that_is_taken_is_an_error_with_a_hint(root):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotCreate, match=rf"port {port}[^0-9](.|\n)*weights.port"):
            async with listen(weights_app(root, TOKEN), "127.0.0.1", port):
                pass


async def test_another_host_than_the_named_one_listens_on_its_own_address(root):
    for here in ("127.0.0.1", "0.0.0.0", ""):
        assert own_address(here) == here
    found = own_address("192.0.2.7")  # RFC 5737: of no host
    if found != "192.0.2.7":  # there is a network
        async with listen(weights_app(root, TOKEN), found, 0) as url:
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
