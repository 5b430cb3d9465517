"""Reading versions inside an engine's process: files, headers, and fetching over a real HTTP server with faults."""

from __future__ import annotations

import functools
import http.server
import importlib
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
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


def described(folder: Path | str, names: list[str], url: str = "", proofs: Sequence[Any] = ()) -> Any:
    return files.Source(str(folder), names, "s", url, proofs)


def served(folder: Path, url: str) -> Any:
    """What lies in a folder, for a server that does not see it."""
    found = [(folder / name).read_bytes() for name in NAMES]
    return described("/nowhere", NAMES, url, [[len(each), xxhash.xxh3_128_hexdigest(each)] for each in found])


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
        if kind.times > 0:
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
    here = bring(landing, served(tmp_path, url), deadline=30)
    for name in NAMES:
        assert Path(here.folder, name).read_bytes() == (tmp_path / name).read_bytes()
    assert "bytes=40-" in kind.asked
    before = len(kind.asked)
    assert bring(landing, served(tmp_path, url)) == here
    assert len(kind.asked) == before


def test_what_no_repeat_would_change_is_refused_for_good(
    server: Any, landing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not as files that did not come."""
    kind, url = server
    kind.token, given = "secret", served(tmp_path, url)
    with pytest.raises(files.BadVersion, match=r"^http.*401.*STREAMRL_WEIGHTS_TOKEN_FILE"):
        bring(landing, given)
    (tmp_path / "token").write_text("secret\n")
    monkeypatch.setenv("STREAMRL_WEIGHTS_TOKEN_FILE", str(tmp_path / "token"))
    (tmp_path / "r1").write_bytes((tmp_path / "r1").read_bytes()[:-1] + b"!")
    with pytest.raises(files.BadVersion, match=r"^http.*not the file that was announced"):
        bring(landing, given)
    monkeypatch.setattr(files, "xxhash", None)
    with pytest.raises(files.BadVersion, match=r"^fetched files cannot be proven: install xxhash"):
        bring(landing, given)


def test_what_is_not_served_ends_within_the_deadline(server: Any, landing: Any, tmp_path: Path) -> None:
    kind, url = server
    some = [[1 << 20, "?"]]
    with pytest.raises(files.BadVersion, match=r"^not fetched: http.*404"):
        bring(landing, described("/nowhere", ["gone"], url, some))
    kind.breaks, kind.times = 0, 1000
    with pytest.raises(files.BadVersion, match=r"^not fetched: .*stopped at byte"):
        bring(landing, described("/nowhere", ["r0"], url, some), deadline=0.2)
    with pytest.raises(files.BadVersion, match=r"^file.*no HTTP"):
        bring(landing, described("/nowhere", ["r0"], "file:///etc", some))
    with pytest.raises(files.BadVersion, match=r"^\.\./r1 is not the name"):  # no name leads out of the folder
        bring(landing, described("/nowhere", ["../r1"], url, some))
    with pytest.raises(files.BadVersion, match=r"^not fetched: .*MiB needed.*--shm-size"):
        bring(landing, described("/nowhere", ["r0"], url, [[1 << 60, "?"]]))


def test_a_landing_prefers_the_folder_and_removes_what_it_fetched(server: Any, landing: Any, tmp_path: Path) -> None:
    _, url = server
    visible = described(tmp_path, NAMES, url)
    assert bring(landing, visible).folder == visible.folder
    with pytest.raises(files.BadVersion, match="/nowhere: the server does not see it"):
        bring(landing, described("/nowhere", NAMES))
    first = bring(landing, served(tmp_path, url))
    second = bring(landing, served(tmp_path, url.replace("v-1-1", "v-1-2")))
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
    source = served(tmp_path, url)
    first = bring(landing, source)
    before = dict(files.Opened(first).tensors())["t1"].clone()
    landing.clear(keep=first)
    for name in NAMES:
        save_file({name: tensor + 1 for name, tensor in load_file(tmp_path / name).items()}, tmp_path / name)
    again = served(tmp_path, url)
    assert [size for size, _ in again.proofs] == [size for size, _ in source.proofs]
    after = dict(files.Opened(bring(landing, again)).tensors())["t1"]
    assert torch.equal(after, before + 1)
    assert torch.equal(dict(files.Opened(first).tensors())["t1"], before)  # what was applied stays


def test_what_was_given_up_leaves_room(server: Any, landing: Any, tmp_path: Path) -> None:
    kind, url = server
    applied = bring(landing, served(tmp_path, url))
    landing.clear(keep=applied)
    kind.breaks, kind.times = 0, 1000
    for version in range(2, 5):
        with pytest.raises(files.BadVersion, match="stopped at byte"):
            bring(landing, served(tmp_path, url.replace("v-1-1", f"v-1-{version}")), deadline=0.2)
    (root,) = (tmp_path / "land").iterdir()
    assert len(list(root.iterdir())) == 2
    assert Path(applied.folder).is_dir()


def test_a_fetch_that_hangs_does_not_hold_up_the_next(
    server: Any, landing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, url = server
    free, download = threading.Event(), files._download
    monkeypatch.setattr(files, "_download", lambda *_: free.wait(30))
    assert not landing.begin(served(tmp_path, url), lambda mine: [mine])
    monkeypatch.setattr(files, "_download", download)
    try:
        assert bring(landing, served(tmp_path, url.replace("v-1-1", "v-1-2")))
        assert not free.is_set()
    finally:
        free.set()


def test_a_folder_that_its_owner_has_emptied_is_made_anew(server: Any, landing: Any, tmp_path: Path) -> None:
    """The role of a server empties `$STREAMRL_LANDING` when it begins and when it ends."""
    _, url = server
    for _ in range(2):
        bring(landing, served(tmp_path, url))
        shutil.rmtree(tmp_path / "land")
    landing.clear()
