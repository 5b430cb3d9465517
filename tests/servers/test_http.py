"""HTTP to engine servers against a real one that goes wrong on purpose."""

from __future__ import annotations

import asyncio
import socket
import traceback
from contextlib import aclosing, asynccontextmanager, suppress

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from streamrl import http
from streamrl.errors import CannotCreate, ConfigError, DataError, Unreachable, WireError
from streamrl.http import BadAnswer, BadRequest, Call, Events, HttpClient, Lost
from tests.http_kit import answering

GET = Call("GET", "/x", repeatable=True)
POST = Call("POST", "/x", {"a": 1})
SAFE_POST = Call("POST", "/x", {"a": 1}, repeatable=True)


class Site:
    """Answers with one of `answers` after the other; the last one for ever."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.seen = []
        self.peers = []

    async def handle(self, request):
        self.seen.append((request.method, request.path_qs, await request.read(), request.headers.get("Authorization")))
        self.peers.append(request.transport.get_extra_info("peername")[1])
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return await answer(request)


def status(code, body="{}", kind="application/json"):
    async def answer(_):
        return web.Response(status=code, text=body, content_type=kind)

    return answer


async def drop(request):
    request.transport.close()
    return web.Response()


async def hang(_):
    await asyncio.sleep(3600)


def stream(*parts, end=True, kind="text/event-stream"):
    async def answer(request):
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(request)
        for part in parts:
            await response.write(part)
        if end:
            await response.write_eof()
        else:
            request.transport.close()
        return response

    return answer


@asynccontextmanager
async def client_of(*answers, **settings):
    site = Site(*answers)
    app = web.Application()
    app.router.add_route("*", "/x", site.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    tcp = web.TCPSite(runner, "127.0.0.1", 0)
    await tcp.start()
    client = HttpClient(f"http://127.0.0.1:{runner.addresses[0][1]}/", **settings)
    try:
        yield client, site
    finally:
        await client.close()
        await runner.cleanup()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(http, "_FIRST_PAUSE", 0.001)


async def test_json_text_and_a_missing_route():
    async with client_of(status(200, '{"b": 2}'), status(200, "metrics 1", "text/plain"), status(404)) as (
        client,
        site,
    ):
        assert await client.call(Call("POST", "/x", {"a": 1}, {"q": "1 2"}), 5) == {"b": 2}
        assert site.seen[0][:3] == ("POST", "/x?q=1+2", b'{"a":1}')
        assert await client.call(GET, 5) == "metrics 1"
        assert await client.call(Call("GET", "/x", optional=True), 5) is None
        with pytest.raises(BadRequest, match="answered 404"):
            await client.call(GET, 5)


@pytest.mark.parametrize("code", [400, 404, 500])
async def test_an_optional_answer_may_be_an_error(code):
    async with client_of(status(code, '{"error": "no tokenizer"}'), status(code)) as (client, _):
        assert await client.call(Call("POST", "/x", {}, optional=True), 5) is None
        with pytest.raises((BadRequest, BadAnswer), match=f"answered {code}"):
            await client.call(Call("POST", "/x", {}), 5)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read: No such file"),
        (b"", "is not a key"),
        (b" \n", "is not a key"),
        (b"first\nsecond\n", "is not a key"),
        (b"Bearer sesame\n", "is not a key"),
        (b"ses\x00ame\n", "is not a key"),
        ("sésame".encode(), "is not a key"),
        (b"\xff\xfe\x00", "is not a key"),
    ],
)
def test_a_file_that_holds_no_key_is_a_clear_error_without_what_it_holds(tmp_path, content, says):
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    with pytest.raises(ConfigError, match=f"x.api_key_file {tmp_path / 'key'} .*{says}") as caught:
        http.read_key("x.api_key_file", tmp_path / "key")
    assert "ame" not in str(caught.value)


def test_a_key_is_what_stands_in_its_file(tmp_path):
    (tmp_path / "key").write_text("\n sesame\t\r\n")
    assert http.read_key("x", tmp_path / "key") == "sesame"
    assert http.read_key("x", None) is None


def test_a_key_that_cannot_be_made_leaves_no_draft_of_it(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.hardlink_to", full)
    with pytest.raises(CannotCreate, match="No space left"):
        http.own_key("x", None, tmp_path / "key")
    assert not list(tmp_path.iterdir())


def test_a_key_of_ours_that_others_may_read_is_closed_to_them(tmp_path):
    key = http.own_key("x", None, tmp_path / "key")
    (tmp_path / "key").chmod(0o644)
    assert http.own_key("x", None, tmp_path / "key") == key
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    (tmp_path / "key").chmod(0o640)
    assert http.own_key("x", tmp_path / "key", tmp_path / "other") == key
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o640, "it is named: its owner decides"


async def test_a_server_that_repeats_the_key_does_not_get_it_into_a_message():
    wrong = "x" * 290 + " no such key: sesame-sesame, go away"
    answers = [
        status(401, f'{{"error": {{"message": "{wrong}"}}}}'),
        status(400, wrong, "text/plain"),
        status(500, '{"detail": ["sesame-sesame", {"sent": "Bearer sesame-sesame"}]}'),
        status(200, '{"sent": "sesame-sesame"'),
    ]
    async with client_of(*answers, api_key="sesame-sesame") as (client, _):
        for error in (BadAnswer, BadRequest, BadAnswer, WireError):
            with pytest.raises(error, match=r"\[key\]|xxx") as caught:
                await client.call(GET, 5)
            assert "sesame" not in "".join(traceback.format_exception(caught.value))


async def test_the_key_is_sent_and_in_no_message():
    async with client_of(status(401), api_key="s3cret") as (client, site):
        with pytest.raises(BadAnswer) as caught:
            await client.call(GET, 5)
        assert site.seen[0][3] == "Bearer s3cret"
        assert "s3cret" not in str(caught.value)
        assert "api_key_file" in caught.value.hint


@pytest.mark.parametrize("code", [503, 429])
@pytest.mark.parametrize("call", [GET, POST])
async def test_what_was_not_carried_out_is_sent_again(code, call):
    async with client_of(*[status(code)] * 5, status(200)) as (client, site):
        assert await client.call(call, 30) == {}
        assert len(site.seen) == 6


async def test_a_server_that_says_503_for_ever_ends_with_the_deadline():
    async with client_of(status(503, '{"error": {"message": "paused"}}')) as (client, _):
        with pytest.raises(Unreachable, match=r"paused|no answer within"):
            await client.call(POST, 0.3)


@pytest.mark.parametrize(("call", "tries"), [(SAFE_POST, 4), (POST, 1)])
async def test_what_may_have_been_carried_out_is_sent_again_only_when_that_is_harmless(call, tries):
    async with client_of(drop) as (client, site):
        with pytest.raises(Lost) as caught:
            await client.call(call, 30)
        assert caught.value.sent
        assert len(site.seen) == tries


async def test_an_error_500_is_an_answer_and_no_control_shares_its_connection():
    async with client_of(status(500, '{"detail": "broken\\nhere"}'), status(200)) as (client, site):
        with pytest.raises(BadAnswer, match="answered 500: broken here") as caught:
            await client.call(SAFE_POST, 5)
        assert caught.value.status == 500
        await client.call(SAFE_POST, 5)
        await client.call(POST, 5)
        assert len(set(site.peers)) == 3


@pytest.mark.parametrize("code", [400, 404, 413, 422])
async def test_a_request_that_is_refused_is_an_error_of_the_data_and_not_repeated(code):
    async with client_of(status(code, '{"object": "error", "message": "too long"}')) as (client, site):
        with pytest.raises(DataError, match="too long"):
            await client.call(SAFE_POST, 5)
        assert len(site.seen) == 1


async def test_nobody_listens():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refused
        client = HttpClient(f"http://127.0.0.1:{taken.getsockname()[1]}", hint="start it")
        try:
            with pytest.raises(Lost) as caught:
                await client.call(POST, 5)
            assert not caught.value.sent
            assert caught.value.hint == "start it"
            assert caught.value.message == f"{POST.method} {client.url}{POST.path}: Connection refused"
        finally:
            await client.close()


async def test_a_server_that_hangs_is_lost_at_the_deadline():
    async with client_of(hang) as (client, site):
        with pytest.raises(Lost, match=r"no answer within 0\.2 s"):
            await client.call(GET, 0.2)
        assert len(site.seen) == 1


async def test_json_that_is_none_and_an_answer_without_end():
    async with client_of(status(200, "{"), status(200, '"%s"' % ("a" * 2000)), max_body=1000) as (client, _):
        with pytest.raises(WireError, match="did not answer with JSON"):
            await client.call(GET, 5)
        with pytest.raises(WireError, match="more than 1000 bytes"):
            await client.call(GET, 5)


async def events_of(client, call=POST, seconds=5):
    async with aclosing(client.stream(call, seconds)) as events:
        return [event async for event in events]


async def test_a_stream_of_events_and_its_connection_used_again():
    parts = [b": ping\n\nda", b'ta: {"a":', b' 1}\r\n\r\ndata:{"b":2}\n\n', b"data: [DONE]\n\n"]
    async with client_of(stream(*parts)) as (client, site):
        for _ in range(3):
            assert await events_of(client) == [{"a": 1}, {"b": 2}]
        assert len(set(site.peers)) == 1


async def test_a_plain_answer_is_one_event():
    async with client_of(status(200, '{"a": 1}')) as (client, _):
        assert await events_of(client) == [{"a": 1}]


async def test_a_stream_waits_while_the_server_says_503_and_is_never_sent_twice_when_it_breaks():
    async with client_of(status(503), status(503), stream(b'data: {"a": 1}\n\n', end=False)) as (client, site):
        events = client.stream(POST, 30)
        assert await anext(events) == {"a": 1}
        with pytest.raises(Lost) as caught:
            await anext(events)
        assert caught.value.sent
        assert len(site.seen) == 3


@pytest.mark.parametrize(("code", "error"), [(500, BadAnswer), (403, BadAnswer), (400, BadRequest), (404, BadRequest)])
async def test_a_stream_that_is_refused(code, error):
    async with client_of(status(code, '{"error": "no"}')) as (client, site):
        with pytest.raises(error, match="no"):
            await events_of(client)
        assert len(site.seen) == 1


@pytest.mark.parametrize("literal", [b"NaN", b"-Infinity", b"{", b"\xff"])
async def test_an_event_that_is_no_json(literal):
    async with client_of(stream(b"data: " + literal + b"\n\n")) as (client, _):
        with pytest.raises(WireError, match="did not answer with JSON"):
            await events_of(client)


async def test_closing_a_stream_hangs_up():
    gone = asyncio.Event()

    async def endless(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"a": 1}\n\n')
        try:
            await asyncio.sleep(3600)
        finally:
            gone.set()

    async with client_of(endless) as (client, _):
        async with aclosing(client.stream(POST, 5)) as events:
            await anext(events)
        await asyncio.wait_for(gone.wait(), 10)


async def test_hundreds_of_streams_at_once_do_not_wait_for_each_other():
    together = asyncio.Barrier(300)

    async def meet(request):
        await asyncio.wait_for(together.wait(), 60)
        return await stream(b"data: 1\n\n")(request)

    async with client_of(meet) as (client, _):
        assert await asyncio.gather(*(events_of(client) for _ in range(300))) == [[1]] * 300


MESSAGES = st.lists(st.binary(max_size=40).filter(lambda b: b"\n" not in b and not b.endswith(b"\r")), max_size=8)


@given(MESSAGES, st.data())
def test_events_do_not_depend_on_where_the_bytes_are_cut(messages, data):
    raw = b": comment\n" + b"".join(b"id: 7\ndata: " + message + b"\r\n\r\n" for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    events = Events()
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert [event for piece in pieces for event in events.feed(piece)] == messages


def test_lines_of_one_event_are_joined_and_a_torn_end_is_dropped():
    assert list(Events().feed(b"data: a\ndata: b\n\ndata: torn")) == [b"a\nb"]


@pytest.mark.parametrize(
    "data", [b"data: " + b"a" * 200, b"a" * 200, b"data: aaaaaaaaaaaa\n" * 20, b"\n\n" + b"a" * 200]
)
def test_an_event_without_end_is_refused(monkeypatch, data):
    monkeypatch.setattr(http, "MAX_MESSAGE", 100)
    events = Events()
    with pytest.raises(WireError, match="more than 100 bytes"):
        for at in range(0, len(data), 7):
            list(events.feed(data[at : at + 7]))


async def test_a_name_that_nobody_knows_is_said_with_its_remedy():
    client = HttpClient("http://nobody.invalid:8000", hint="start it")
    with pytest.raises(Lost, match=r"nobody\.invalid:8000/x: .*not known") as caught:
        await client.call(GET, 5, retry=False)
    await client.close()
    assert "DNS" in caught.value.hint


# --- proxies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "variables", "through"),
    [
        ("rewards.example", {}, True),
        ("rewards.example", {"NO_PROXY": "rewards.example"}, False),
        ("127.0.0.1", {}, False),
        ("localhost", {}, False),
    ],
)
async def test_proxies_of_the_environment_hold_for_other_hosts(monkeypatch, host, variables, through):
    asked = []

    def answer(request):
        asked.append(request.path)
        return 200, b'{"ok": 1}'

    for name in ("HTTP_PROXY", "http_proxy", "NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with answering(answer) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        client = HttpClient(f"http://{host}:9")
        try:
            with suppress(Lost):
                await client.call(Call("GET", "/v1"), 10.0, retry=False)
        finally:
            await client.close()
    assert asked == ([f"http://{host}:9/v1"] if through else [])
