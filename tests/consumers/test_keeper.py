"""The keeper of a sandbox by itself: its lines, and what it does for an ordinary user, who may map no other user."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest

from streamrl.consumers.sandbox import SandboxLimits, inside
from streamrl.consumers.sandbox.sandbox import _START, SLOWEST
from tests.consumers.sandboxes import need
from tests.needs import missing

ORDINARY = 41234
LIMITS = {**asdict(SandboxLimits(cpu=20, wall=60, disk=16 << 20)), "slowest": SLOWEST}


@pytest.fixture
def package():
    """A folder with the keeper's code that everybody can read."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(Path(inside.__file__).parent, Path(folder) / "inside")
        for path in (Path(folder), *Path(folder).rglob("*")):
            path.chmod(0o755)
        yield folder


def order(text, **changes):
    return {
        "isolation": "namespaces",
        "network": False,
        "argv": ["/bin/sh", "-c", text],
        "environ": {"PATH": "/usr/bin:/bin"},
        "files": {},
        "visible": [],
        "folder": "",
        "limits": LIMITS,
    } | changes


def started(package, **options):
    """A keeper; as another user, with the system's Python, which he may execute."""
    python = "/usr/bin/python3" if options else sys.executable
    argv = [python, "-I", "-S", "-c", _START, package]
    return subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"PATH": os.defpath}, text=True, **options
    )


def ask(keeper, *lines):
    """Send lines, and return the answer to the last."""
    keeper.stdin.writelines(json.dumps(line) + "\n" for line in lines)
    keeper.stdin.flush()
    return json.loads(keeper.stdout.readline())


def ended(keeper):
    """Let go of the lifeline and return the exit code."""
    keeper.stdin.close()
    with keeper.stdout:
        return keeper.wait(60)


def once(package, text, **options):
    """What comes of one run as another user."""
    keeper = started(package, **options)
    answer = ask(keeper, order(text), {"stdin": ""})
    assert ended(keeper) == 0
    return answer


@pytest.fixture
def user():
    """Options of a process of an ordinary user; ends the test where there is no way to be one."""
    need("namespaces")
    if os.geteuid() != 0:
        return {"user": os.geteuid()}
    if not Path("/usr/bin/python3").exists():
        missing("the system has no Python that other users may execute")
    return {"user": ORDINARY, "group": ORDINARY, "extra_groups": []}


READ_ONLY, DENIED, FORBIDDEN = "Read-only file system", "[Pp]ermission denied", "Operation not permitted"
REFUSED = {
    "touch /usr/x": READ_ONLY,
    "cat /proc/1/environ": DENIED,
    "echo 9 > /proc/sys/user/max_user_namespaces": f"{DENIED}|{READ_ONLY}|Directory nonexistent",
    "unshare --user true": FORBIDDEN,
    "chmod 777 /": f"{READ_ONLY}|{FORBIDDEN}",
    "mkdir /x": f"{READ_ONLY}|{DENIED}",
    "mount -t tmpfs tmpfs /tmp": f"{DENIED}|{FORBIDDEN}|must be superuser",
}


def test_an_ordinary_user_can_isolate(package, user):
    answer = once(package, "id -u; pwd; grep CapEff /proc/self/status", **user)
    assert answer["stdout"] == "65534\n/tmp\nCapEff:\t0000000000000000\n"


@pytest.mark.parametrize(("text", "why"), REFUSED.items())
def test_the_program_of_an_ordinary_user_has_none_of_his_rights(package, user, text, why):
    answer = once(package, text, **user)
    assert answer["outcome"] == "ended"
    assert answer["code"] not in {0, 126, 127}, "the command is there, and it failed"
    assert re.search(why, answer["stderr"])


def test_the_program_of_an_ordinary_user_cannot_end_the_sandbox(package, user):
    answer = once(package, "for number in 2 9 15; do kill -$number 1; done; sleep 0.2; echo alive", **user)
    assert (answer["outcome"], answer["stdout"]) == ("ended", "alive\n")


def test_processes_are_limited_for_an_ordinary_user_too(package, user):
    answer = once(package, "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do sleep 9 & done", **user)
    assert answer["outcome"] == "ended"
    assert re.search("fork", answer["stderr"])


def test_it_answers_every_request_in_turn_and_ends_with_its_lifeline(package):
    folder = tempfile.mkdtemp()
    keeper = started(package)
    first = ask(keeper, order("cat; exit 4", isolation="none", folder=folder), {"stdin": "a"})
    second = ask(keeper, {"stdin": "b"})
    assert [(answer["stdout"], answer["code"]) for answer in (first, second)] == [("a", 4), ("b", 4)]
    assert ended(keeper) == 0
    assert not Path(folder).exists()
    assert ended(started(package)) == 0


@pytest.mark.parametrize("wrong", [{"folder": "/no/such/folder"}, {"files": {"a/b": ""}}, {"argv": ["/no/such"]}])
def test_what_it_cannot_do_is_an_error_in_one_line(package, wrong, tmp_path):
    keeper = started(package)
    answer = ask(keeper, order("true", isolation="none", folder=str(tmp_path)) | wrong, {"stdin": ""})
    assert "Error" in answer["error"]
    assert ended(keeper) == 0


def test_signals_do_not_end_it(package, tmp_path):
    keeper = started(package)
    ask(keeper, order("true", isolation="none", folder=str(tmp_path)), {"stdin": ""})
    for number in (signal.SIGINT, signal.SIGTERM):
        keeper.send_signal(number)
    assert ask(keeper, {"stdin": ""})["code"] == 0
    assert ended(keeper) == 0
