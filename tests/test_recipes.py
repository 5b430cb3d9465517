"""The recipes of examples/ with tiny stand-ins of model and data: they start, and the cheapest ones train."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from streamrl.demo.prepare import make_chat_tokenizer
from streamrl.runfile import load
from tests.cli.run_kit import cli, process

EXAMPLES = Path(__file__).parents[1] / "examples"
LINES: dict[str, dict[str, Any]] = {
    "smollm": {"prompt": "34 + 57 =", "answer": "91"},
    "gsm8k": {"question": "What is 6 times 12?", "answer": "6 times 12 is <<6*12=72>>72.\n#### 72"},
    "reverse_text": {"prompt": "The community in Bruck"},
    "countdown": {"nums": [44, 19, 35], "target": 98},
    "code": {"text": "Add two numbers.", "test_list": ["assert add(1, 2) == 3"], "code": "", "test_setup_code": ""},
    "search_tool": {"id": "test_0", "question": "who wrote it", "golden_answers": ["Ada"]},
    "qwen3_8b_8gpu": {"prompt": "6 times 12?", "solution": "72", "problem": "6 times 12?", "answer": "72"},
}
SMALL = (
    *("engine.kind=hf", "engine.servers=1", "engine.threads=1", "engine.slots=16", "engine.device=cpu"),
    *("learner.ranks=1", "learner.threads=1", "learner.device=cpu", "learner.steps=2", "learner.groups_per_step=2"),
    *("model.context=600", "sampling.max_new_tokens=8", "sampling.group_size=4", "evaluation.every=0"),
    *("evaluation.final_prompts=0", "weights.quantize=null", "weights.transport=directory", "redis.fsync_period=0.1"),
    *("data.max_prompt_tokens=590", "scoring.overlong=null"),
)
"""What fits on two cores; everything else is as the recipe says."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama, as SmolLM2 is one, of random weights; it reads characters, and ChatML as text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_chat_tokenizer()
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=1, max_position_embeddings=1024, **sizes, **ids)
    ).save_pretrained(folder)
    return folder


def settings(recipe: str, model: Path, folder: Path) -> list[str]:
    """Arguments of `up` that put the stand-ins in."""
    line = orjson.dumps(LINES[recipe]) + b"\n"
    (folder / "lines.jsonl").write_bytes(16 * line)
    data = [f"data.{part}={folder / 'lines.jsonl'}" for part in ("train", "held_out")]
    words = [f"model.path={model}", *data, *SMALL]
    return [str(EXAMPLES / recipe / "run.yaml"), *(part for value in words for part in ("--set", value))]


@pytest.mark.parametrize("recipe", LINES)
def test_a_recipe_could_start(recipe: str, model: Path, tmp_path: Path):
    done = cli("up", *settings(recipe, model, tmp_path), "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "start  learner.0" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("recipe", ["smollm", "reverse_text"])
def test_a_recipe_trains_two_steps(recipe: str, model: Path, tmp_path: Path):
    done = process("up", *settings(recipe, model, tmp_path), "--screen", "plain", cwd=tmp_path, seconds=280)
    assert done.returncode == 0, done.stdout + done.stderr
    [run] = (tmp_path / "runs").iterdir()
    assert orjson.loads((run / "summary.json").read_bytes())["steps"] == 2


@pytest.mark.parametrize("recipe", LINES)
def test_a_recipe_is_whole_as_it_stands(recipe: str):
    load(EXAMPLES / recipe / "run.yaml", environ={})
    page = (EXAMPLES / recipe / "README.md").read_text()
    assert all(part in page for part in ("```bash", "**Memory.**", "**What to expect.**", "**What to change first**"))
    assert len(page.split()) < 400


def score(monkeypatch: pytest.MonkeyPatch, recipe: str, reward: str, text: str, answer: str = "", **line: Any) -> float:
    """What a reward of a recipe gives to a response."""
    monkeypatch.syspath_prepend(str(EXAMPLES / recipe))
    module, _, function = reward.partition(":")
    sample = SimpleNamespace(text=text, prompt=SimpleNamespace(answer=answer, metadata=line))
    given: float = getattr(import_module(module), function)(sample)
    return given


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("35 + 44 is 79, and 19.</think><answer> 35 + 44 + 19 </answer>", 1.0),
        ("<answer>1</answer> No: <answer>19 + (44 + 35)</answer>", 1.0),
        ("<answer>98</answer>", 0.0),
        ("<answer>35 + 44 + 19 + 0</answer>", 0.0),
        ("<answer>35 + 44 - -19</answer>", 0.0),
        ("<answer>44 + 35 + True * 19</answer>", 0.0),
        ("<answer>44 / (35 - 35) + 19</answer>", 0.0),
        ("<answer>__import__('os').getcwd()</answer>", 0.0),
        ("<answer>" + "(" * 5000 + "</answer>", 0.0),
        ("<answer>44 + 35 + 19", 0.0),
    ],
)
def test_countdown_counts_each_number_once(monkeypatch: pytest.MonkeyPatch, text: str, right: float):
    assert score(monkeypatch, "countdown", "my_countdown:equation", text, nums=[44, 19, 35], target=98) == right


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("<reversed_text>\ncba\n</reversed_text>", 1.0),
        ("<reversed_text>cbx</reversed_text>", 4 / 6),  # twice the two letters in common, of six
        ("cba", 0.0),
    ],
)
def test_reverse_text_gives_the_share_in_common(monkeypatch: pytest.MonkeyPatch, text: str, share: float):
    assert score(monkeypatch, "reverse_text", "my_reverse:similarity", text, "abc") == pytest.approx(share)


@pytest.mark.parametrize(
    ("text", "right"),
    [("<answer> the Ada  Lovelace. </answer>", 1.0), ("<answer>Ada</answer>", 0.0), ("Ada Lovelace", 0.0)],
)
def test_search_tool_compares_as_squad_does(monkeypatch: pytest.MonkeyPatch, text: str, right: float):
    golden = ["Ada Lovelace", "A. Lovelace"]
    assert score(monkeypatch, "search_tool", "my_search:exact_match", text, golden_answers=golden) == right
