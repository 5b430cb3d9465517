"""The reference on servers that go wrong on purpose; real ones are in tests/engines/test_reference_live.py."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import orjson
import pytest
from aiohttp import web
from test_fit import LETTERS
from tiny_policy import VOCABULARY, make_batch, run_config
from tokenizers import AddedToken
from transformers import Qwen2Tokenizer
from tree_kit import THREE, make_episodes

from streamrl.errors import ConfigError, DataError, StreamrlError, Unreachable, WireError
from streamrl.learner import reference_servers
from streamrl.learner.reference_servers import NoReference, ServerReference
from streamrl.learner.tree import Tree
from streamrl.wire import PROMPT

KINDS = ["vllm", "sglang"]


def score(token: int) -> float:
    """Log-probability that every server here says of a token."""
    return -0.5 - token / 100


class Server:
    """Answers like a real one, but for what `wrong` does to it; runs in a thread with a loop of its own."""

    def __init__(
        self, kind: str = "vllm", *, context: int | None = 4096, wrong=None, tokenizer=None, vocabulary=VOCABULARY
    ) -> None:
        self.kind, self.context, self.wrong = kind, context, wrong
        self.tokenizer, self.vocabulary = tokenizer, vocabulary
        self.scored = 0
        self.keys: set[str | None] = set()

    async def models(self, request: web.Request) -> web.Response:
        self.keys.add(request.headers.get("Authorization"))
        entry = {"id": "reference", "owned_by": self.kind, "max_model_len": self.context}
        return web.json_response({"data": [{"id": "adapter", "parent": "reference"}, entry]})

    async def complete(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        assert (body["model"], body["max_tokens"], body["prompt_logprobs"]) == ("reference", 1, 0)
        if len(body["prompt"]) == 2 and not body["prompt"][0]:  # the question at the start
            return web.json_response({}) if body["prompt"][1] < self.vocabulary else await refuses(body)
        entries = [None] + [{str(token): {"logprob": score(token), "rank": 1}} for token in body["prompt"][1:]]
        return await self.answer({"choices": [{"text": "", "prompt_logprobs": entries}]})

    async def generate(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        assert body["return_logprob"] is True
        tail = body["input_ids"][body["logprob_start_len"] :]
        # As the real one does, it calls the last token of its vocabulary 0.
        entries = [[None, tail[0], None]] + [[score(token), token % (VOCABULARY - 1), None] for token in tail[1:]]
        return await self.answer({"text": "", "meta_info": {"input_token_logprobs": entries}})

    async def tokenize(self, request: web.Request) -> web.Response:
        if self.tokenizer is None:
            return web.json_response({"error": "started without a tokenizer"}, status=400)
        body = orjson.loads(await request.read())
        assert (body["model"], body["add_special_tokens"]) == ("reference", False)
        return web.json_response({"tokens": self.tokenizer.encode(body["prompt"], add_special_tokens=False)})

    async def answer(self, whole) -> web.Response:
        self.scored += 1
        if self.wrong is not None:
            changed = await self.wrong(whole)
            if isinstance(changed, web.Response):
                return changed
        return web.json_response(whole)

    @contextmanager
    def running(self):
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            runner = asyncio.run_coroutine_threadsafe(self._start(), loop).result(10)
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)
            loop.close()

    async def _start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/tokenize", self.tokenize)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner


async def fails(_):
    return web.Response(status=500, text="out of memory")


async def hangs(_):
    await asyncio.sleep(3600)


async def refuses(_):
    return web.json_response({"error": {"message": "token id 60 is out of vocabulary"}}, status=400)


async def logits(whole):
    whole["choices"][0]["prompt_logprobs"] = [
        entry and {token: {"logprob": 7.5} for token in entry} for entry in whole["choices"][0]["prompt_logprobs"]
    ]


async def impossible(whole):
    last = whole["choices"][0]["prompt_logprobs"][-1]
    last[next(iter(last))]["logprob"] = -9999.0


async def other_tokens(whole):
    for entry in whole["meta_info"]["input_token_logprobs"]:
        entry[1] += 1


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(reference_servers, "_PAUSE", 0.02)


@pytest.fixture
def make(one_rank, model_of):
    with ExitStack() as stack:

        def reference(*servers, deadline=20.0, model=None, **more):
            urls = [server if isinstance(server, str) else stack.enter_context(server.running()) for server in servers]
            settings = {"kind": "remote", "url": urls, "deadline": deadline, **more}
            return ServerReference(run_config(model or model_of("Llama"), reference=settings), one_rank, VOCABULARY)

        yield reference


def assert_scored(found, batch):
    for values, sample in zip(found, batch, strict=True):
        assert values.dtype == np.float32
        assert values == pytest.approx([score(token) for token in sample.tokens.tolist()], rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_each_branch_of_an_episode_is_scored_once(make, kind):
    server = Server(kind)
    batch = make_episodes(1, groups=1, size=2, rows=THREE)
    assert_scored(make(server).compute_ref_log_prob(batch), batch)
    assert server.scored == 2 * 3


def test_an_observed_token_may_be_impossible_under_the_reference(make):
    async def never_sees_60(whole):
        for entry in whole["choices"][0]["prompt_logprobs"][1:]:
            if "60" in entry:
                entry["60"]["logprob"] = -9999.0

    tree = Tree((PROMPT, 0, 1), (1, 0, 1), (EMPTY, np.asarray([60, 60], np.int32), EMPTY), (0.0,) * 3, ((),) * 3)
    sample = replace(make_batch(0, groups=1, size=1)[0], tree=tree, **arrays(2))
    assert_scored(make(Server(wrong=never_sees_60)).compute_ref_log_prob([sample]), [sample])


EMPTY = np.zeros(0, dtype=np.int32)


def arrays(count):
    zeros = np.zeros(count, dtype=np.float32)
    steps = np.zeros(count, dtype=np.int64)
    return {"tokens": np.full(count, 3, np.int32), "logprobs": zeros, "advantages": zeros, "steps": steps}


@pytest.mark.parametrize("kind", KINDS)
def test_every_response_is_scored_in_its_place(make, kind):
    batch = make_batch(0)
    first, second = Server(kind), Server(kind)
    reference = make(first, second)
    assert_scored(reference.compute_ref_log_prob(batch), batch)
    assert reference.compute_ref_log_prob([]) == []
    assert first.scored + second.scored == len(batch)
    assert min(first.scored, second.scored) > 0


@pytest.mark.parametrize("wrong", [fails, hangs])
def test_what_one_server_does_not_answer_another_one_does(make, wrong, caplog):
    batch = make_batch(1)
    bad, good = Server(wrong=wrong), Server("sglang")
    reference = make(bad, good, deadline=6.0)
    assert_scored(reference.compute_ref_log_prob(batch), batch)
    assert good.scored == len(batch)
    assert "reference server failed" in caplog.text


def test_a_server_that_is_down_is_done_without(make):
    batch = make_batch(2)
    assert_scored(make("http://127.0.0.1:9", Server()).compute_ref_log_prob(batch), batch)


def test_a_server_that_comes_back_is_asked_again(make):
    batch = make_batch(3)
    server = Server()

    async def once(_):
        server.wrong = None
        return web.Response(status=503)

    server.wrong = once
    assert_scored(make(server).compute_ref_log_prob(batch), batch)


def test_no_server_at_all_is_an_error_with_its_reason(make):
    with pytest.raises(Unreachable, match=r"within 0.3 s: .*Connection refused(.|\n)*learner.reference.url"):
        make("http://127.0.0.1:9", deadline=0.3)


def test_servers_that_only_hang_end_at_the_deadline(make):
    reference = make(Server(wrong=hangs), deadline=0.5)
    with pytest.raises(Unreachable, match=r"no answer within 0\.25 s"):
        reference.compute_ref_log_prob(make_batch(4))


def test_a_response_that_is_refused_is_named(make):
    with pytest.raises(DataError, match=r"group 0: .*out of vocabulary"):
        make(Server(wrong=refuses)).compute_ref_log_prob(make_batch(5, groups=1))


@pytest.mark.parametrize(
    ("kind", "wrong", "message"),
    [
        ("vllm", logits, "no log-probability: 7.5"),
        ("vllm", impossible, "no log-probability: -9999"),
        ("sglang", other_tokens, "other tokens"),
    ],
)
def test_answers_that_make_no_sense_are_refused_when_all_servers_give_them(make, kind, wrong, message):
    bad = Server(kind, wrong=wrong)
    with pytest.raises(WireError, match=message):
        make(bad, Server(kind, wrong=wrong)).compute_ref_log_prob(make_batch(6))
    batch = make_batch(6)
    assert_scored(make(bad, Server()).compute_ref_log_prob(batch), batch)


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (Server("llamacpp"), "server of 'llamacpp'"),
        (Server(context=128), "scores 127 tokens(.|\n)*129 or more"),
        (Server("sglang", context=134), "scores 127 tokens(.|\n)*135 or more"),
    ],
)
def test_servers_that_do_not_fit_are_refused_at_the_start(make, server, message):
    with pytest.raises(ConfigError, match=message):
        make(Server(), server, "http://127.0.0.1:9")


@pytest.fixture
def tokenized(tmp_path):
    """A model's folder with a tokenizer of these letters and added tokens, and the tokenizer."""

    def make(letters, *added):
        vocabulary = {"<pad>": 0} | {letter: place for place, letter in enumerate(letters, start=1)}
        tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], unk_token="<pad>", pad_token="<pad>")
        tokenizer.add_tokens([AddedToken(word, special=True) for word in added])
        folder = tmp_path / f"{letters[:2]}{len(added)}"
        tokenizer.save_pretrained(folder)
        return folder, tokenizer

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_another_tokenizer_is_refused_at_the_start(make, tokenized, kind):
    policy, same = tokenized(LETTERS, "<think>")
    make(Server(kind, tokenizer=same), model=policy)
    make(Server(kind, tokenizer=tokenized(LETTERS, "<think>", "<more>")[1]), model=policy)
    for other in (tokenized(LETTERS[::-1], "<think>"), tokenized(LETTERS), tokenized(LETTERS, "<call>", "<think>")):
        with pytest.raises(ConfigError, match=r"another tokenizer(.|\n)*the tokenizer of model.path"):
            make(Server(kind, tokenizer=other[1]), model=policy)


def test_where_one_side_has_no_tokenizer_they_are_not_compared(make, tokenized, caplog):
    caplog.set_level(logging.INFO, "streamrl.learner.reference_servers")
    policy, tokenizer = tokenized(LETTERS)
    make(Server(), model=policy)
    make(Server(tokenizer=tokenizer))
    assert caplog.text.count("tokenizers not compared") == 2


def test_fewer_tokens_are_refused_at_the_start(make):
    with pytest.raises(ConfigError, match=r"knows fewer tokens than the policy, 61: .*out of vocabulary"):
        make(Server(vocabulary=60))


class OtherRank:
    """A second rank that did as well as `outcome` says, behind the one all-reduce of each call."""

    def __init__(self) -> None:
        self.outcome = 2

    def all_min(self, *values):
        return [min(value, self.outcome) for value in values]


@pytest.mark.parametrize(("outcome", "kind"), [(1, NoReference), (0, StreamrlError)])
def test_what_fails_on_another_rank_fails_here(make, outcome, kind):
    reference = make(Server())
    reference._ranks = other = OtherRank()
    batch = make_batch(7)
    assert_scored(reference.compute_ref_log_prob(batch), batch)
    other.outcome = outcome
    with pytest.raises(kind, match="another rank") as raised:
        reference.compute_ref_log_prob(batch)
    assert type(raised.value) is kind


def test_what_is_worse_wins_over_ranks(make):
    """Here the answer may come later, but the other rank was refused for good."""
    reference = make(Server(wrong=hangs), deadline=0.5)
    reference._ranks = other = OtherRank()
    batch = make_batch(8)
    with pytest.raises(NoReference, match=r"within 0\.5 s"):
        reference.compute_ref_log_prob(batch)
    other.outcome = 0
    with pytest.raises(StreamrlError, match="another rank") as raised:
        reference.compute_ref_log_prob(batch)
    assert type(raised.value) is StreamrlError


def test_the_key_is_sent_and_a_missing_file_is_named(make, tmp_path):
    (tmp_path / "key").write_text("secret\n")
    server = Server()
    make(server, api_key_file=tmp_path / "key")
    assert server.keys == {"Bearer secret"}
    with pytest.raises(ConfigError, match=r"api_key_file .*absent"):
        make(server, api_key_file=tmp_path / "absent")
