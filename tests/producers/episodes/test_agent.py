"""Agents as processes: what they get, how they end, and what becomes of all that they have started."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import replica_kit
import torch
from producer_kit import until as until_true
from pydantic import ValidationError
from replica_kit import Learner, admit, replica_on
from transformers import AutoModelForCausalLM

from streamrl.consumers.reward import RewardSample
from streamrl.consumers.rules.episode import EpisodeScore
from streamrl.errors import DataError, PluginError, Unreachable
from streamrl.producers.engines.hf import HfEngine
from streamrl.producers.episodes.sampler import EpisodeFailed, EpisodeSampler, episode_of
from streamrl.producers.tokenizer import Tokenizer
from tests.waits import until

from .chat_kit import HERMES, make_tokenizer
from .episode_kit import ADD, Script, call, config_of, order_of, save_talker

TOKENIZER = make_tokenizer(HERMES, eos="<|im_end|>")

OPENAI_AGENT = """
import json, os
from openai import OpenAI

task = json.load(open(os.environ["STREAMRL_TASK"]))
assert "answer" not in task and task["metadata"] == {"level": 1}, task
number = {"type": "integer"}
parameters = {"type": "object", "properties": {"a": number, "b": number}}
tools = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": parameters}}]
client, messages = OpenAI(), task["messages"]
while True:
    if len(messages) % 2:
        message = client.chat.completions.create(model="gpt", messages=messages, tools=tools).choices[0].message
    else:
        with client.chat.completions.stream(model="gpt", messages=messages, tools=tools) as stream:
            message = stream.get_final_completion().choices[0].message
    messages.append(message)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        try:
            arguments = json.loads(call.function.arguments)
            said = str(arguments["a"] + arguments["b"])
        except Exception as error:
            said = f"error: {error!r}"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
"""

CLIENT = """
import json, os, subprocess, sys, time, urllib.error, urllib.request
from pathlib import Path

def post(path, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + path
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=20) as answer:
        return json.load(answer)

def ask(text="x"):
    return post("/chat/completions", {"messages": [{"role": "user", "content": text}]})
"""


def agent(folder, code):
    """The command of an agent that begins with `CLIENT`."""
    (folder / "agent.py").write_text(CLIENT + code)
    return [sys.executable, "-S", str(folder / "agent.py")]


async def played(command, texts=("six",), *, agent=None, **episode):
    """The sample of an agent, and the engine that it asked."""
    engine = texts if isinstance(texts, Script) else Script(TOKENIZER, texts)
    config = config_of({"agent": {"command": command, **(agent or {})}, **episode})
    async with EpisodeSampler(config, engine, TOKENIZER, episode_of(config), "rollout.0") as sampler:
        return await sampler.sample(order_of(TOKENIZER))


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def written(file):
    return file.exists() and file.read_text()


async def test_an_unchanged_agent_of_the_openai_package_with_a_real_model(tmp_path):
    """What was sampled has the log-probabilities of a forward pass over the branch."""
    save_talker(tmp_path, calls=[ADD])
    (tmp_path / "agent.py").write_text(OPENAI_AGENT)
    config = config_of(
        {"agent": {"command": [sys.executable, str(tmp_path / "agent.py")]}, "max_turns": 64},
        model={"path": str(tmp_path), "context": 1024},
        engine={"threads": 1},
    )
    tokenizer = Tokenizer.load(config.model)
    engine = HfEngine(config, 1)
    await engine.start()
    try:
        async with EpisodeSampler(config, engine, tokenizer, episode_of(config), "rollout.0") as sampler:
            orders = [order_of(tokenizer) for _ in range(4)]
            orders = [type(order)(order.prompt, id=f"r-{n}") for n, order in enumerate(orders)]
            samples = await asyncio.gather(*map(sampler.sample, orders))
            assert sampler.figures()["forks"] == 0
    finally:
        await engine.close()
    assert {sample.stop for sample in samples} == {"completed"}
    longest = max(samples, key=lambda sample: len(sample.turns))
    assert len(longest.turns) >= 4, "no agent called a tool"
    assert [turn.parent for turn in longest.turns[1:]] == [*range(len(longest.turns) - 1)]
    assert {use.name for turn in longest.turns for use in turn.tools} == {"add"}
    ids, kept = branch(longest)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    expected = logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()[np.array(kept[1:])]
    np.testing.assert_allclose(longest.token_logprobs, expected, atol=1e-4)


def branch(sample):
    ids, kept, at = [], [], 0
    for turn in sample.turns:
        own = turn.observed_ids if turn.observed else sample.token_ids[at : at + turn.sampled]
        kept += [bool(turn.sampled)] * len(own)
        at += turn.sampled
        ids += own.tolist()
    return ids, kept


async def test_what_an_agent_gets(tmp_path, monkeypatch):
    monkeypatch.setenv("STREAMRL_OWN", "1")
    monkeypatch.setenv("no_proxy", "example.org")
    monkeypatch.setenv("LC_TIME", "C")
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "secret")
    code = """
ask()
seen = {**os.environ, "argv": sys.argv[1:], "cwd": os.getcwd(), "task": json.load(open(os.environ["STREAMRL_TASK"]))}
seen["cmdline"] = Path("/proc/self/cmdline").read_text()
Path(os.environ["SEEN"]).write_text(json.dumps(seen))
post("/streamrl/reward", {"reward": 0.5})
"""
    settings = {"variables": {"SEEN": str(tmp_path / "seen"), "HF_TOKEN": "mine"}, "answer": True}
    monkeypatch.chdir(tmp_path)
    sample = await played([*agent(tmp_path, code), "agent.py", "other.py"], agent=settings)
    assert sample.score.value == 0.5
    assert (sample.text, sample.stop) == ("six", "completed")
    seen = json.loads((tmp_path / "seen").read_text())
    assert seen["argv"] == [str(tmp_path / "agent.py"), "other.py"]  # the file holds in any directory
    assert seen["OPENAI_BASE_URL"].startswith("http://127.0.0.1:")
    assert seen["ANTHROPIC_API_KEY"] == seen["OPENAI_API_KEY"] not in seen["cmdline"]
    assert seen["no_proxy"] == "example.org,127.0.0.1"
    assert (seen["LC_TIME"], seen["HF_TOKEN"]) == ("C", "mine")
    assert "secret" not in seen.values()
    assert "STREAMRL_OWN" not in seen
    assert (seen["task"]["text"], seen["task"]["answer"], seen["task"]["line"]) == ("what is 1 + 2?", "3", 7)
    assert seen["task"]["messages"] == [{"role": "user", "content": "what is 1 + 2?"}]
    assert seen["task"]["rendered"].startswith("<|im_start|>user\nwhat is 1 + 2?<|im_end|>")
    assert not Path(seen["cwd"]).exists()
    assert not Path(seen["STREAMRL_TASK"]).exists()


async def test_an_agent_that_fails_is_named_with_what_it_printed_and_without_its_key(tmp_path):
    code = "print('my key', os.environ['OPENAI_API_KEY']); sys.exit('out of ideas')"
    with pytest.raises(EpisodeFailed, match=r"ended \(exit 1\); it printed last") as caught:
        await played(agent(tmp_path, code))
    assert "out of ideas" in str(caught.value)
    assert "my key ***" in str(caught.value)
    with pytest.raises(EpisodeFailed, match=r"ended \(killed by SIGKILL\) and printed nothing"):
        await played(agent(tmp_path, "os.kill(os.getpid(), 9)"))


FAILS = "ask(); sys.exit('I cannot read this')"
POSTS = f"post('/streamrl/reward', {{'reward': 0.25}}); {FAILS}"


@pytest.mark.parametrize(
    ("code", "settings", "score"),
    [
        (POSTS, {}, 0.25),
        (POSTS, {"failed_score": 0}, 0.25),
        (FAILS, {"failed_score": 0}, 0.0),
        (FAILS, {"failed_score": -1.5}, -1.5),
        (FAILS, {}, None),
    ],
)
async def test_an_agent_that_fails_after_a_reply_has_a_score_only_if_it_or_the_run_says_so(
    tmp_path, caplog, code, settings, score
):
    sample = await played(agent(tmp_path, code), agent=settings)
    assert (sample.stop, sample.text) == ("agent_failed", "six")
    assert (None if sample.score is None else sample.score.value) == score
    (record,) = [record for record in caplog.records if record.message == "an agent failed"]
    assert "I cannot read this" in record.why
    if score is None:  # the words are for other rewards; this one has no number
        with pytest.raises(DataError, match="failed and posted no score"):
            await EpisodeScore().score(RewardSample.of(order_of(TOKENIZER).prompt, sample))


async def test_an_agent_that_fails_may_be_a_dead_letter_at_once(run, tmp_path, monkeypatch):
    """Another try would shield the model from what it said: each agent has run once."""
    save_talker(tmp_path / "talker")
    code = f"ask(); Path({str(tmp_path)!r}, 'ran' + str(os.getpid())).touch(); sys.exit('no JSON')"
    run.set("model", path=str(tmp_path / "talker"), context=512).set("engine", threads=1, slots=4)
    run.set("episode", agent={"command": agent(tmp_path, code), "failed": "drop"})
    run.set("sampling", group_size=2, max_new_tokens=16)
    async with run.open() as ledgers:
        learner = await Learner.of(run, ledgers, version=None)
        talker = AutoModelForCausalLM.from_pretrained(tmp_path / "talker", dtype=torch.float32)
        monkeypatch.setattr(replica_kit, "tiny_model", lambda seed: talker)
        await learner.publish(1)
        await admit(run, ledgers.train, 1)
        async with replica_on(run, ledgers) as (_, role, _):
            await until_true(lambda: letters_of(ledgers.train))
        assert role.status["agents_failed"] == 2
        letters = await letters_of(ledgers.train)
    assert len(letters) == len(list(tmp_path.glob("ran*"))) == 2
    assert all("ended (exit 1)" in letter.why and "no JSON" in letter.why for letter in letters)


async def letters_of(ledger):
    """Of all samples of the group, once they are there."""
    letters = [letter for letter in await ledger.dead_letters() if letter.sample is not None]
    return letters if len(letters) == 2 else []


async def test_a_command_that_is_no_program_stops_the_run_at_its_start():
    with pytest.raises(PluginError, match="no-such-agent is no program"):
        await played("no-such-agent --flag 'a b'")


@pytest.mark.parametrize("key", [{"remote": True}, {"command": "x", "port": 1}, {"command": "x", "token_file": "t"}])
def test_keys_of_programs_that_fetch_tasks_are_refused(key):
    with pytest.raises(ValidationError, match=r"use `agent: \{command: \[ssh, HOST, PROGRAM\]\}`"):
        config_of({"agent": key})


def test_what_was_saved_with_the_defaults_of_these_keys_can_be_read():
    saved = {"command": ["x"], "remote": False, "port": 0, "token_file": None}
    assert config_of({"agent": saved}).episode.agent.command == ("x",)


async def test_an_agent_that_runs_out_of_time_is_killed_with_its_children_and_has_the_score_that_it_posted(tmp_path):
    code = f"""
inner = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '600'], start_new_session=True); " \\
        "print(p.pid, flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-S", "-c", inner], stdout=subprocess.PIPE)
pids = [os.getpid(), child.pid, int(child.stdout.readline())]
Path({str(tmp_path / "pids")!r}).write_text(" ".join(map(str, pids)))
ask()
post("/streamrl/reward", {{"reward": 0.25}})
time.sleep(600)
"""
    sample = await played(agent(tmp_path, code), deadline=5.0)
    assert (sample.stop, sample.text, sample.score.value) == ("rollout_timeout", "six", 0.25)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 3
    assert [pid for pid in pids if alive(pid)] == []


async def test_an_agent_that_goes_on_after_the_last_turn_is_told_so_and_keeps_its_reward(tmp_path):
    code = """
ask()
try:
    ask("more")
except urllib.error.HTTPError as error:
    assert error.code == 410, error.code
post("/streamrl/reward", {"reward": 0.25})
sys.exit(3)
"""
    sample = await played(agent(tmp_path, code), max_turns=1)
    assert (sample.stop, sample.score.value) == ("max_turns", 0.25)


async def test_an_agent_that_fails_because_the_context_is_full_has_ended_so(tmp_path):
    code = """
ask()
post("/streamrl/reward", {"reward": 0.25})
ask("zebra " * 600)
"""
    sample = await played(agent(tmp_path, code))
    assert (sample.stop, sample.score.value, sample.text) == ("context_overflow", 0.25, "six")


async def test_an_agent_that_compacts_goes_on(tmp_path):
    code = """
ask()
try:
    ask("zebra " * 600)
except urllib.error.HTTPError as error:
    assert json.load(error)["error"]["code"] == "context_length_exceeded"
ask("in short")
"""
    sample = await played(agent(tmp_path, code), ["one", "two"])
    assert (sample.stop, sample.text) == ("completed", "two")


async def test_an_engine_that_dies_under_an_agent_is_not_the_agents_fault(tmp_path):
    with pytest.raises(Unreachable, match="gone"):
        await played(agent(tmp_path, "ask()"), [Unreachable("gone")])


def test_agents_end_with_the_process_that_started_them(tmp_path):
    """After `kill -9` of the replica, its agents are gone, and so are their directories."""
    own = tmp_path / "own"
    own.mkdir()
    code = f"Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid())); time.sleep(600)"
    starter = f"""
import asyncio
from pathlib import Path
from streamrl.config.episode import AgentConfig
from streamrl.producers.episodes.agent import start_agent

async def main():
    config = AgentConfig(command={agent(tmp_path, code)!r})
    process = await start_agent(config, Path({str(own)!r}), {{"OPENAI_BASE_URL": "http://127.0.0.1:1/v1"}}, "secret")
    await process.wait()

asyncio.run(main())
"""
    replica = subprocess.Popen([sys.executable, "-c", starter])
    with replica:
        try:
            pid = int(until(lambda: written(tmp_path / "pid"), "the agent runs"))
            assert alive(pid)
        finally:
            replica.send_signal(signal.SIGKILL)
    until(lambda: not alive(pid), "its end")
    until(lambda: not own.exists(), "nothing is left in /tmp")


async def test_a_sample_that_is_given_up_takes_its_agent_along(tmp_path):
    code = f"Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid())); time.sleep(600)"
    task = asyncio.create_task(played(agent(tmp_path, code)))
    pid = await asyncio.to_thread(until, lambda: written(tmp_path / "pid"), "the agent runs")
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert not alive(int(pid))


async def test_an_agent_that_makes_no_call_runs_out_of_time_at_its_start(tmp_path):
    with pytest.raises(DataError, match=r"without a single sampled token: .* ran out of time during start"):
        await played(agent(tmp_path, "time.sleep(600)"), deadline=1.0)


async def test_bad_calls_are_named_in_the_record(tmp_path):
    code = """
tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
messages = [{"role": "user", "content": "x"}]
for _ in range(2):
    message = post("/chat/completions", {"messages": messages, "tools": [tool]})["choices"][0]["message"]
    answers = [{"role": "tool", "tool_call_id": c["id"], "content": "no"} for c in message.get("tool_calls", [])]
    messages += [message, *answers]
"""
    texts = [call(ADD, '{"name": "ad", "arguments": {}}', '{"name": "add", "arguments": {"a": '), "sorry"]
    sample = await played(agent(tmp_path, code), texts)
    assert [[use.outcome for use in turn.tools] for turn in sample.turns if turn.tools] == [
        ["ok", "unknown", "malformed"]
    ]
