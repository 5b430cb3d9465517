"""What runs on the nodes of a Ray cluster, without Ray: news of a process in small pieces, nothing left out."""

from __future__ import annotations

import asyncio
from pathlib import Path

from streamrl.runtime.placement.ray_node import GrowingFile, KnownDirectory, RoleKeeper, mark_of
from streamrl.runtime.plan import RoleCommand

SAYS = """
from pathlib import Path
for number in range(3000):
    print("line", number)
with Path("metrics/rollout.0.jsonl").open("a") as file:
    for number in range(3000):
        file.write(f"{{\\"step\\": {number}}}\\n")
"""


async def test_news_is_small_and_the_last_one_has_the_exit_code(tmp_path: Path):
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "rollout.0.jsonl").write_text("of an earlier life\n")
    keeper = RoleKeeper()
    directory = KnownDirectory(tmp_path, b"another supervisor's", {"run.json": b"{}"})
    await keeper.start(RoleCommand(("-c", SAYS), {}), {}, directory, ["metrics/rollout.0.jsonl"])
    output, grown = b"", b""
    async with asyncio.timeout(30):
        while True:
            news = await keeper.news()
            assert len(news.output) <= 32 << 10
            assert all(len(data) < 33 << 10 for data in news.grown.values())
            output += news.output
            grown += news.grown.get("metrics/rollout.0.jsonl", b"")
            if news.code is not None:
                break
    assert news.code == 0
    assert output.count(b"\n") == grown.count(b"\n") == 3000
    assert b"earlier" not in grown
    assert (tmp_path / "run.json").read_bytes() == b"{}"


def test_whole_lines_of_a_growing_file(tmp_path: Path):
    file = tmp_path / "lines"
    growing = GrowingFile(file)
    assert growing.take() == b""
    long = b"x" * 100_000 + b"\n"
    file.write_bytes(long + b"half")
    assert growing.take() == long
    assert growing.take() == b""
    with file.open("ab") as more:
        more.write(b" and half\n")
    assert growing.take() == b"half and half\n"


def test_a_directory_is_the_supervisors_by_its_lock(tmp_path: Path):
    (tmp_path / "supervisor.lock").write_bytes(b"mine")
    assert KnownDirectory(tmp_path, mark_of(tmp_path), {}).is_here()
    assert not KnownDirectory(tmp_path, b"other", {}).is_here()
    assert not KnownDirectory(tmp_path / "nowhere", b"mine", {}).is_here()
