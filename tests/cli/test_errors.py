"""Exit codes and messages of everything that goes wrong, and what the command line may import."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from streamrl import cli as command_line
from streamrl.errors import (
    CannotCreate,
    ConfigError,
    DeadlineExceeded,
    ExitCode,
    Fenced,
    Refused,
    StreamrlError,
    Unreachable,
    UsageError,
    WireError,
)
from tests.redis_kit import Probe

from .run_kit import DOC, cli, make_run, process


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["lagg"], "Did you mean 'lag'?"),
        (["lag", "--jsn"], "No such option"),
        (["trace", "minus"], "GROUP"),
        (["run", "critic"], "critic"),
        (["up", "--fresh", "--resume", "--set", "name=x"], "name it"),
    ],
)
def test_a_wrong_command_line_is_2_and_says_what_is_wrong(arguments: list[str], says: str, tmp_path: Path):
    done = cli(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("arguments", [[], ["dead"], ["config"]])
def test_a_command_without_its_command_shows_the_help(arguments: list[str], capsys):
    assert command_line.run(arguments) == 2
    shown = capsys.readouterr()
    assert "Usage:" in shown.out + shown.err


def test_a_process_ends_with_the_code(tmp_path: Path):
    done = process("lag", "--run", str(tmp_path))
    assert done.returncode == 78
    assert re.fullmatch(r"error: .* is not a run directory.*\nhint: .*\n", done.stderr)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"config": 3}', b'{"config": {"name": "x"}}'])
def test_a_foreign_run_json_is_refused(tmp_path: Path, content: bytes):
    (tmp_path / "run.json").write_bytes(content)
    for command in ("lag", "status", "logs"):
        done = cli(command, "--run", str(tmp_path))
        assert (done.returncode, "Traceback" in done.stderr) == (78, False)
        assert "run.json" in done.stderr


def test_a_file_instead_of_a_run_directory(tmp_path: Path):
    (tmp_path / "file").touch()
    assert cli("lag", "--run", str(tmp_path / "file")).returncode == 78


def test_the_newest_run_is_taken(tmp_path: Path):
    make_run(tmp_path / "runs" / "old", "name=old")
    make_run(tmp_path / "runs" / "new", "name=new")
    os.utime(tmp_path / "runs" / "old" / "run.json", (1, 1))
    assert "run new" in cli("status", cwd=tmp_path).stdout
    assert "run old" in cli("status", cwd=tmp_path, env={"STREAMRL_RUN": "runs/old"}).stdout


def test_a_foreign_redis_that_is_away_is_69(tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    make_run(tmp_path, f"redis.url=redis://:secret@127.0.0.1:{port}/0")
    done = cli("lag", "--run", str(tmp_path))
    assert done.returncode == 69
    assert f"127.0.0.1:{port}" in done.stderr
    assert "secret" not in done.stderr
    assert cli("status", "--run", str(tmp_path)).returncode == 69


async def test_a_server_that_accepts_and_says_nothing_is_69(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("streamrl.queues.connection.LOOK_SECONDS", 0.3)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        make_run(tmp_path, f"redis.url=redis://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        done = await asyncio.to_thread(cli, "lag", "--run", str(tmp_path))
    assert done.returncode == 69
    assert "no reply within" in done.stderr


def test_a_web_server_in_the_place_of_redis_is_78(tmp_path: Path):
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        make_run(tmp_path, f"redis.url=redis://127.0.0.1:{server.server_port}/0")
        done = cli("lag", "--run", str(tmp_path))
        server.shutdown()
    assert (done.returncode, "what answers at redis.url is no Redis" in done.stderr) == (78, True)


async def test_a_server_that_wants_another_password_is_78(tmp_path: Path, redis_run):
    with Probe(redis_run.config.url) as probe:
        probe.call("CONFIG", "SET", "requirepass", "right")
    make_run(tmp_path, f"redis.url={redis_run.config.url}")
    done = await asyncio.to_thread(cli, "lag", "--run", str(tmp_path))
    assert (done.returncode, "NOAUTH" in done.stderr) == (78, True)
    secret = tmp_path / "password"
    for word, code in (("wrong", 78), ("right", 0)):
        secret.write_text(f"{word}\n")
        make_run(tmp_path, f"redis.url={redis_run.config.url}", f"redis.password_file={secret}")
        assert (await asyncio.to_thread(cli, "lag", "--run", str(tmp_path))).returncode == code


ERRORS = [
    (UsageError, 2),
    (ConfigError, 78),
    (Refused, 78),
    (CannotCreate, 73),
    (Unreachable, 69),
    (DeadlineExceeded, 75),
    (WireError, 70),
    (Fenced, 0),
]


@pytest.mark.parametrize(("kind", "code"), ERRORS)
def test_each_error_of_ours_has_its_exit_code(kind: type[StreamrlError], code: int, monkeypatch, capsys):
    def fail() -> int:
        raise kind("what and where", "how to mend it")

    monkeypatch.setattr("streamrl.commands.version.version", fail)
    assert command_line.run(["version"]) == code
    assert capsys.readouterr().err == "error: what and where\nhint: how to mend it\n"


def test_closed_streams_are_no_bug():
    closed = f"{sys.executable} -m streamrl version <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", closed], check=False).returncode == 0


def test_the_first_error_of_ours_in_a_group_counts(monkeypatch, capsys):
    def fail() -> int:
        raise BaseExceptionGroup("tasks", [ValueError("noise"), ExceptionGroup("in", [Unreachable("no Redis")])])

    monkeypatch.setattr("streamrl.commands.version.version", fail)
    assert command_line.run(["version"]) == 69
    assert capsys.readouterr().err == "error: no Redis\n"


def test_a_bug_is_70_in_one_line_and_a_traceback_with_debug(monkeypatch, capsys):
    def fail() -> int:
        raise ZeroDivisionError("surprise")

    monkeypatch.setattr("streamrl.commands.version.version", fail)
    assert command_line.run(["version"]) == 70
    error = capsys.readouterr().err
    assert error.startswith("error: ZeroDivisionError: surprise\n")
    assert "Traceback" not in error
    assert command_line.run(["version", "--debug"]) == 70
    assert "Traceback" in capsys.readouterr().err


def interrupts() -> None:
    raise KeyboardInterrupt


def meets_the_making_of_a_class() -> None:
    class Meets:
        def __set_name__(self, owner: type, name: str) -> None:
            raise KeyboardInterrupt

    type("Made", (), {"meets": Meets()})


def meets_a_task_group() -> None:
    raise BaseExceptionGroup("tasks", [ValueError("noise"), KeyboardInterrupt()])


@pytest.mark.parametrize("fail", [interrupts, meets_the_making_of_a_class, meets_a_task_group])
def test_ctrl_c_is_no_bug_wherever_it_comes(fail: Callable[[], None], monkeypatch, capsys):
    monkeypatch.setattr("streamrl.commands.version.version", fail)
    assert command_line.run(["version"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("loaded", ["_lzma", "_multiarray_umath"])
def test_ctrl_c_while_modules_are_loaded_is_no_bug(loaded: str, tmp_path: Path):
    """Typer loads the first, `up` the second; then it would wait for somebody to write its run file."""
    os.mkfifo(tmp_path / "run.yaml")
    command = [sys.executable, "-m", "streamrl", "up", str(tmp_path / "run.yaml")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, cwd=tmp_path, text=True) as up:
        end = time.monotonic() + 30
        while loaded not in Path(f"/proc/{up.pid}/maps").read_text():
            assert time.monotonic() < end
            assert up.poll() is None
        up.send_signal(signal.SIGINT)
        assert (up.wait(30), up.stderr.read()) == (130, "")


def test_the_published_table_has_every_exit_code():
    page = DOC.with_name("cli.md").read_text()
    table = page.partition("## Exit codes")[2].partition("**Roles.**")[0]
    published = {int(code) for row in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE) for code in row.split(",")}
    assert published == {int(code) for code in ExitCode}


def test_every_command_that_is_written_of_exists():
    root = DOC.parents[2]
    for file in [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "streamrl").rglob("*.py")]:
        for said in re.findall(r"`streamrl ([a-z]+(?: [a-z]+)*)", file.read_text()):
            first, *rest = said.split()
            assert first in command_line.COMMANDS, f"{file}: streamrl {said}"
            command = command_line.load_command(first)
            for word in rest:
                known = getattr(command, "commands", {word: None})
                assert word in known, f"{file}: streamrl {said}"
                command = known[word]


def test_help_shows_all_that_it_says():
    """What is written in brackets rich takes for its own markup, and leaves it out."""
    for name, command in _commands():
        for said in (command.help, *(getattr(parameter, "help", None) for parameter in command.params)):
            assert not re.search(r"\[[a-z]", said or ""), (name, said)


def test_the_list_of_commands_says_what_each_says_of_itself():
    for name, (_, line) in command_line.COMMANDS.items():
        assert command_line.load_command(name).help.replace("\n", " ").startswith(line.removesuffix(".")), name


@functools.cache
def _commands():
    """Every command that `--help` shows, with its whole name."""

    def below(command, name: str):
        if not hasattr(command, "commands"):
            return [(name, command)]
        return [found for word, child in command.commands.items() for found in below(child, f"{name} {word}")]

    return [found for name in command_line.COMMANDS for found in below(command_line.load_command(name), name)]


@pytest.mark.parametrize(
    "module",
    ["streamrl.cli", "streamrl.queues", "streamrl.consumers", "streamrl.monitor.screen", "streamrl.commands.finish"],
)
def test_looking_needs_no_torch(module: str):
    heavy = ("torch", "transformers", "safetensors", "matplotlib")
    code = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


async def test_lag_loads_nothing_heavy(live_run: Path):
    code = (
        "import sys; from streamrl.cli import run; code = run(['lag', '--run', sys.argv[1]]);"
        "heavy = ('torch', 'numpy', 'streamrl.commands.up');"
        "print(code, [name for name in heavy if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(live_run)]
    out = await asyncio.to_thread(subprocess.check_output, command, text=True)
    assert out.splitlines()[-1] == "0 []"
