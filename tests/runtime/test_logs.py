import io
import logging
import sys
import warnings
from pathlib import Path

import orjson
import pytest

from streamrl.errors import CannotCreate
from streamrl.runtime.logs import log_as_json, log_to_file


@pytest.fixture
def root():
    target = logging.getLogger()
    before, level = target.handlers[:], target.level
    yield target
    target.handlers[:] = before
    target.setLevel(level)
    logging.captureWarnings(False)


def test_everything_a_role_logs_is_one_json_object_per_line(root, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    log_as_json("reward.0")
    logger = logging.getLogger("some.library")
    logger.info("samples failed: 1", extra={"group": 7, "why": ("a", {"b": object})})
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logger.exception("failed %s", "badly")
    warnings.warn("old", DeprecationWarning, stacklevel=1)
    first, second, third = [orjson.loads(line) for line in sys.stderr.getvalue().splitlines()]
    assert (first["role"], first["level"], first["event"], first["group"]) == (
        "reward.0",
        "info",
        "samples failed: 1",
        7,
    )
    assert second["event"] == "failed badly"
    assert second["exception"].endswith("ValueError: two\nlines")
    assert "old" in third["event"]


def test_the_supervisors_log_is_a_file_with_one_old_file_and_ends_with_its_block(root, tmp_path):
    path = tmp_path / "logs" / "supervisor.jsonl"
    with log_to_file("supervisor", path, 2000):
        for number in range(100):
            logging.getLogger("streamrl.x").info("state", extra={"number": number})
    logging.getLogger("streamrl.x").info("not in the file")
    assert sorted(file.name for file in path.parent.iterdir()) == ["supervisor.jsonl", "supervisor.jsonl.1"]
    assert all(file.stat().st_size <= 2000 for file in path.parent.iterdir())
    assert orjson.loads(path.read_bytes().splitlines()[-1])["number"] == 99


def test_a_log_that_cannot_be_opened_is_an_error_with_its_path(root, tmp_path):
    (tmp_path / "logs").write_text("")
    with pytest.raises(CannotCreate, match="logs"), log_to_file("supervisor", tmp_path / "logs" / "x", 100):
        pass


def test_what_is_logged_beside_the_text_never_replaces_the_records_own_fields(root, monkeypatch):
    """A library, or the code of a reward, may call its extras what it likes."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    log_as_json("reward.0")
    logger = logging.getLogger("my.reward")
    theirs = {"at": "rewards.py:3", "role": "judge", "level": 9, "logger": "x", "event": "y", "exception": "z"}
    logger.warning("a reward keeps memory", extra={**theirs, "size": 1})
    line = orjson.loads(sys.stderr.getvalue())
    assert isinstance(line["at"], float)
    own = {"role": "reward.0", "level": "warning", "logger": "my.reward", "event": "a reward keeps memory", "size": 1}
    assert line == {"at": line["at"], **own, **{f"{name}_": value for name, value in theirs.items()}}


def test_a_full_disk_costs_lines_and_nothing_else(root, capsys):
    with log_to_file("supervisor", Path("/dev/full"), 1 << 20):
        for _ in range(3):
            logging.getLogger("some.library").info("line")
    assert capsys.readouterr().err == "/dev/full cannot be written: [Errno 28] No space left on device\n"


def test_a_line_that_cannot_be_formatted_is_no_full_disk_and_every_one_is_shown(root, tmp_path, capsys):
    class NotShown:
        def __str__(self):
            raise ValueError("no words for this")

    with log_to_file("supervisor", tmp_path / "supervisor.log", 1 << 20):
        for number in range(2):
            logging.getLogger("some.library").info("line %d", number, extra={"what": NotShown()})
    errors = capsys.readouterr().err
    assert "cannot be written" not in errors
    assert errors.count("ValueError: no words for this") == 2
    assert "Message: 'line %d'\nArguments: (1,)" in errors
