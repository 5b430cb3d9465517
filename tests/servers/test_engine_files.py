"""Reading versions inside an engine's process: files, headers, and fetching over a real HTTP server with faults."""

from __future__ import annotations

import functools
import http.server
import importlib
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from streamrl.servers.launch import PLUGIN

sys.path.insert(0, str(PLUGIN))
files = importlib.import_module("streamrl_engine.files")
sys.path.remove(str(PLUGIN))


NAMES = ["r0", "r1", "r2"]


def bring(landing: Any, source: Any, **limit: float) -> Any:
    """As the only rank."""
    return landing.bring(source, lambda mine: [mine], **limit)


def described(folder: Path | str, names: list[str], url: str = "") -> Any:
    return files.Source(str(folder), names, "s", url)


def test_tensors_and_their_heads_are_those_of_all_files(tmp_path: Path) -> None:
    whole = torch.arange(15, dtype=torch.float32).reshape(5, 3).bfloat16()
    save_file({"w": whole, "s": torch.tensor(7.0)}, tmp_path / "a")
    save_file({"b": torch.tensor([1, 2])}, tmp_path / "b")
    opened = files.Opened(described(tmp_path, ["b", "a"]))
    for name in ("a", "b"):
        (tmp_path / name).unlink()  # a version may lose its files while it waits
    found = dict(opened.tensors())
    assert list(found) == ["b", "s", "w"]
    assert torch.equal(found["w"], whole)
    assert found["b"].tolist() == [1, 2]
    assert found["s"].item() == 7
    assert opened.heads() == {
        "w": files.Head("BF16", (5, 3)), "b": files.Head("I64", (2,)), "s": files.Head("F32", ())
    }  # fmt: skip


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(files.BadVersion, match=r"cannot read .*gone"):
        files.Opened(described(tmp_path, ["gone"]))


@given(data=st.data())
def test_a_damaged_header_or_a_cut_file_is_refused(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    folder = tmp_path_factory.mktemp("cut")
    save_file({"w": torch.ones(4, 4)}, folder / "r0")
    whole = (folder / "r0").read_bytes()
    cut = data.draw(st.integers(0, len(whole) - 1))
    (folder / "r0").write_bytes(whole[:cut])
    with pytest.raises(files.BadVersion):
        files.Opened(described(folder, ["r0"]))
    (folder / "r0").write_bytes(data.draw(st.binary(max_size=60)) + whole[:cut])
    with pytest.raises(files.BadVersion):
        files.Opened(described(folder, ["r0"]))


class Served(http.server.SimpleHTTPRequestHandler):
    """Breaks off after `breaks` bytes of an answer, so often as `times` says; knows ranges."""

    breaks, times, token, ranges = 0, 0, "", True
    asked: list[str | None]

    def do_GET(self) -> None:
        path = Path(self.directory, self.path.lstrip("/").split("/", 1)[-1])
        self.asked.append(self.headers.get("Range"))
        if self.token and self.headers.get("Authorization") != f"Bearer {self.token}":
            self.send_error(401)
            return
        if not path.exists():
            self.send_error(404)
            return
        data, start = path.read_bytes(), 0
        asked = self.headers.get("Range")
        if asked and self.ranges:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        kind = type(self)
        if kind.times > 0 and path.name != "manifest.json":
            kind.times -= 1
            self.wfile.write(data[start : start + kind.breaks])
            self.wfile.flush()
            self.close_connection = True
            return
        self.wfile.write(data[start:])

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[type[Served], str]]:
    for number, name in enumerate(NAMES):
        save_file({f"t{number}": torch.arange(9) + number}, tmp_path / name)
    shards = [
        {"file": f.name, "bytes": f.stat().st_size, "checksum": xxhash.xxh3_128_hexdigest(f.read_bytes())}
        for f in sorted(tmp_path.iterdir())
    ]
    manifest = {"base": None, "shards": shards[:-1], "quantised": {"kind": "int8", "shards": shards[-1:]}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    kind = type("Kind", (Served,), {"asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(kind, directory=str(tmp_path))) as one:
        thread = threading.Thread(target=one.serve_forever, args=(0.01,))
        thread.start()
        yield kind, f"http://127.0.0.1:{one.server_address[1]}/v-1-1"
        one.shutdown()
        thread.join(10)


@pytest.fixture
def landing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "land").mkdir()
    monkeypatch.setenv("STREAMRL_LANDING", str(tmp_path / "land"))
    return files.Landing()


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_transfer_goes_on(server: Any, landing: Any, tmp_path: Path, ranges: bool) -> None:
    kind, url = server
    kind.breaks, kind.times, kind.ranges = 40, 3, ranges
    here = bring(landing, described("/nowhere", NAMES, url), deadline=30)
    for name in NAMES:
        assert Path(here.folder, name).read_bytes() == (tmp_path / name).read_bytes()
    assert "bytes=40-" in kind.asked
    before = len(kind.asked)
    assert bring(landing, described("/nowhere", NAMES, url)) == here
    assert len(kind.asked) == before + 1  # the manifest alone


def test_a_token_a_checksum_and_a_delta_are_looked_at(
    server: Any, landing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, url = server
    kind.token, given = "secret", described("/nowhere", NAMES, url)
    with pytest.raises(files.BadVersion, match="401"):
        bring(landing, given)
    (tmp_path / "token").write_text("secret\n")
    monkeypatch.setenv("STREAMRL_WEIGHTS_TOKEN_FILE", str(tmp_path / "token"))
    (tmp_path / "r1").write_bytes((tmp_path / "r1").read_bytes()[:-1] + b"!")
    with pytest.raises(files.BadVersion, match="not the file that was announced"):
        bring(landing, given)
    (tmp_path / "manifest.json").write_text(json.dumps({"base": [1, 1], "shards": []}))
    with pytest.raises(files.BadVersion, match="delta"):
        bring(landing, given)


def test_what_is_not_served_ends_within_the_deadline(server: Any, landing: Any, tmp_path: Path) -> None:
    kind, url = server
    sizes = {"r0": 1 << 30, "gone": 4, "../r1": 4}
    shards = [{"file": name, "bytes": size, "checksum": "?"} for name, size in sizes.items()]
    (tmp_path / "manifest.json").write_text(json.dumps({"base": None, "shards": shards}))
    with pytest.raises(files.BadVersion, match="404"):
        bring(landing, described("/nowhere", ["gone"], url))
    kind.breaks, kind.times = 0, 1000
    with pytest.raises(files.BadVersion, match="stopped at byte"):
        bring(landing, described("/nowhere", ["r0"], url), deadline=0.2)
    with pytest.raises(files.BadVersion, match="no HTTP"):
        bring(landing, described("/nowhere", ["r0"], "file:///etc"))
    for name in ("r9", "../r1"):  # no name leads out of the folder
        with pytest.raises(files.BadVersion, match="does not announce"):
            bring(landing, described("/nowhere", [name], url))


def test_a_landing_prefers_the_folder_and_removes_what_it_fetched(server: Any, landing: Any, tmp_path: Path) -> None:
    _, url = server
    visible = described(tmp_path, NAMES, url)
    assert bring(landing, visible).folder == visible.folder
    with pytest.raises(files.BadVersion, match="does not see /nowhere"):
        bring(landing, described("/nowhere", NAMES))
    first = bring(landing, described("/nowhere", NAMES, url))
    second = bring(landing, described("/nowhere", NAMES, url.replace("v-1-1", "v-1-2")))
    assert first.folder != second.folder
    landing.clear(keep=second)
    assert not Path(first.folder).exists()
    assert set(files.Opened(second).heads()) == {"t0", "t1", "t2"}
    landing.clear()
    assert list((tmp_path / "land").iterdir()) == []
    landing.clear()


def test_a_landing_notices_that_other_bytes_are_served_at_the_same_address(
    server: Any, landing: Any, tmp_path: Path
) -> None:
    """As a run does that begins anew under the name and the port of the one before, at a server that went on."""
    _, url = server
    source = described("/nowhere", NAMES, url)
    first = bring(landing, source)
    before = dict(files.Opened(first).tensors())["t1"].clone()
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    for shard in manifest["shards"]:
        path = tmp_path / shard["file"]
        save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path)
        assert path.stat().st_size == shard["bytes"]
        shard["checksum"] = xxhash.xxh3_128_hexdigest(path.read_bytes())
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert torch.equal(dict(files.Opened(first).tensors())["t1"], before)  # what was brought stays
    after = dict(files.Opened(bring(landing, source)).tensors())["t1"]
    assert torch.equal(after, before + 1)
