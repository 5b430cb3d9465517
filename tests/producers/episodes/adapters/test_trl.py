"""Environment classes, dicts of factories and tools as TRL takes them."""

from __future__ import annotations

import copy
import json

import pytest

from streamrl import wire
from streamrl.config import SourceConfig
from streamrl.errors import DataError, PluginError
from streamrl.producers.dataset import PromptLimits, load_prompts
from streamrl.producers.episodes.adapters.trl import TRLEpisode
from streamrl.producers.episodes.environment import EnvironmentEpisode, ToolEpisode
from streamrl.producers.sampler import SampleOrder

from .adapter_kit import TOKENIZER, asks, opened, order_with, played, real_model

HERE = "trl_environments"


async def test_the_class_of_the_documentation_is_an_environment():
    from trl_environments import IncrementEnv

    said = [asks("increment", '{"step": 2}'), asks("increment", '{"step": 3}'), "done"]
    found = await played(EnvironmentEpisode(IncrementEnv), said)
    assert "Increment the internal counter." in found.prompts[0]
    assert "Value to add to the counter." in found.prompts[0]
    assert "<tool_response>\n5\n</tool_response>" in found.prompts[2]
    assert found.sample.score is None  # no get_reward: others score it


SYSTEM = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "2+2?"}]}]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ({"prompt": "what is 2+2?"}, "what is 2+2?"),
        ({"prompt": [{"role": "user", "content": "2+2?"}]}, "2+2?"),
        ({"messages": SYSTEM, "rendered": "mine"}, "2+2?"),
        ({"messages": SYSTEM[:1]}, ""),
    ],
    ids=["text", "prompt of messages", "parts", "no user"],
)
async def test_reset_gets_what_the_line_says_and_not_what_the_template_makes_of_it(tmp_path, line, text):
    class Remembers:
        def reset(self, **row):
            given.update(copy.deepcopy(row))

    given = {}
    (tmp_path / "data.jsonl").write_text(json.dumps(line))
    data = load_prompts([SourceConfig(source=tmp_path / "data.jsonl")], TOKENIZER, PromptLimits(512, 1024))
    order = SampleOrder(wire.decode(data.prompts[0], wire.Prompt), id="1")
    await played(EnvironmentEpisode(Remembers), ["done"], order)
    prompt = line.get("prompt") or line["messages"]
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    assert (given["prompt"], given["text"]) == (prompt, text)
    assert given["messages"] == messages
    if isinstance(prompt, str):
        assert given["rendered"] == ""
    elif "rendered" not in line:
        assert given["rendered"].startswith(f"<|im_start|>{prompt[0]['role']}\n")
    else:
        assert given["rendered"] == "mine", "a field of the line"


async def test_lines_choose_among_several_factories_and_see_only_its_tools():
    episode = TRLEpisode(f"{HERE}:FACTORIES", tools=[f"{HERE}:multiply"])
    said = [
        asks("guess", '{"number": 9}'),
        asks("guess", '{"number": 3}'),
        "done",
        asks("multiply", '{"a": 6, "b": 7}'),
    ]
    async with opened(episode, [*said, asks("guess", '{"number": 3}'), "done"]) as play:
        guessed = await play(order_with(environment="guess", level=4))
        counted = await play(order_with(environment="increment", level=4))
        with pytest.raises(
            DataError, match="line 7 of the data set has environment 'chess'; there are: increment, guess"
        ):
            await play(order_with(environment="chess"))
    assert guessed.sample.score.value == 0.5
    assert "what is 1 + 2? Level 4.<|im_end|>" in guessed.prompts[0]
    assert guessed.uses == [("guess", "ok"), ("guess", "ok")]
    assert counted.uses == [("multiply", "ok"), ("guess", "unknown")]
    assert '"name": "guess"' not in counted.prompts[3]
    assert "<tool_response>\n42\n</tool_response>" in counted.prompts[4]


async def test_a_dict_of_import_paths_is_one_of_factories():
    episode = TRLEpisode({"guess": f"{HERE}:GuessEnv"})
    found = await played(episode, [asks("guess", '{"number": 3}'), "done"], order_with(environment="guess", level=1))
    assert found.sample.score.value == 1.0


async def test_tools_alone_are_the_tools_of_trl():
    from trl_environments import multiply, roll

    said = [asks("multiply", '{"a": 2, "b": 4}') + asks("roll", "{}"), "done"]
    found = await played(ToolEpisode([multiply, roll]), said)
    assert found.uses == [("multiply", "ok"), ("roll", "ok")]


@pytest.mark.parametrize(
    "use", [f"{HERE}:ABSENT", f"{HERE}:NOT_CALLABLE", f"{HERE}:random", f"{HERE}:Undocumented", "absent_module:X"]
)
def test_what_is_no_factory_is_refused(use):
    with pytest.raises(PluginError):
        TRLEpisode(use)


async def test_a_real_model_plays(tmp_path):
    episode = TRLEpisode(f"{HERE}:GuessEnv", tools=[f"{HERE}:add"])
    async with real_model(episode, tmp_path / "talker", max_turns=4) as (sampler, _):
        samples = [await sampler.sample(order_with(level=1)) for _ in range(6)]
    uses = [use for sample in samples for turn in sample.turns for use in turn.tools]
    assert ("add", "ok") in {(use.name, use.outcome) for use in uses}
    assert {sample.stop for sample in samples} <= {"completed", "max_turns"}
