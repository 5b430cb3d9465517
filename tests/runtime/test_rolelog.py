import orjson
from hypothesis import given
from hypothesis import strategies as st

from streamrl.runtime.role_log import LONGEST_LINE, RoleLog


def lines(path):
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def test_json_lines_are_kept_and_the_rest_is_wrapped(tmp_path):
    log = RoleLog("reward.0", tmp_path / "logs" / "reward.0.jsonl", 1 << 20)
    log.feed(b'{"event": "a"}\nTraceback (most')
    log.feed(b" recent)\n\n{not json\n[1]\nno newline at the end \xff")
    log.close()
    found = lines(tmp_path / "logs" / "reward.0.jsonl")
    assert found[0] == {"event": "a"}
    assert [line["event"] for line in found[1:]] == [
        "Traceback (most recent)", "{not json", "[1]", "no newline at the end \ufffd",
    ]  # fmt: skip
    assert {line["role"] for line in found[1:]} == {"reward.0"}


def test_rotation_keeps_one_old_file_and_never_more_than_twice_the_limit(tmp_path):
    path = tmp_path / "x.jsonl"
    log = RoleLog("x", path, 1000)
    for number in range(500):
        log.feed(orjson.dumps({"event": number}) + b"\n")
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 2000
    log.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["x.jsonl", "x.jsonl.1"]
    numbers = [line["event"] for name in ("x.jsonl.1", "x.jsonl") for line in lines(tmp_path / name)]
    assert numbers == list(range(numbers[0], 500))
    assert [orjson.loads(line)["event"] for line in log.tail] == list(range(300, 500))


def test_a_log_goes_on_where_the_last_supervisor_stopped(tmp_path):
    for _ in range(2):
        log = RoleLog("x", tmp_path / "x.jsonl", 1 << 20)
        log.feed(b'{"event": 1}\n')
        log.close()
    assert len(lines(tmp_path / "x.jsonl")) == 2


def test_an_endless_line_is_cut_and_costs_no_memory(tmp_path):
    log = RoleLog("x", tmp_path / "x.jsonl", 10 << 20)
    for _ in range(100):
        log.feed(b"y" * 10_000)
        assert len(log._rest) <= LONGEST_LINE
    log.feed(b"end\nnext\n")
    log.close()
    first, second = lines(tmp_path / "x.jsonl")
    assert len(first["event"]) == LONGEST_LINE
    assert second["event"] == "next"


def test_a_log_that_cannot_be_written_loses_lines_and_not_the_role(tmp_path):
    (tmp_path / "logs").write_text("a file where the directory should be")
    log = RoleLog("x", tmp_path / "logs" / "x.jsonl", 1000)
    assert len(log.feed(b"a\nb\n")) == 2
    assert log.lost == 2
    full = RoleLog("x", tmp_path / "full.jsonl", 1000)
    (tmp_path / "full.jsonl").symlink_to("/dev/full")
    assert len(full.feed(b"a\n")) == 1
    assert full.lost == 1
    full.close()


@given(st.lists(st.binary(max_size=40), max_size=20), st.data())
def test_where_the_output_is_cut_into_pieces_does_not_matter(tmp_path_factory, texts, data):
    output = b"\n".join(texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(output)), max_size=10)))
    pieces = [output[a:b] for a, b in zip([0, *cuts], [*cuts, len(output)], strict=True)]
    folder = tmp_path_factory.mktemp("log")
    log = RoleLog("x", folder / "x.jsonl", 1 << 20)
    taken = [line for piece in pieces for line in log.feed(piece)] + log.close()
    wanted = [line for line in output.split(b"\n") if line.strip()]
    assert len(taken) == len(wanted)
    for line, text in zip(taken, wanted, strict=True):
        parsed = orjson.loads(line)
        assert parsed == _json(text) or parsed["event"] == text.rstrip(b"\r").decode(errors="replace")


def _json(text):
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
