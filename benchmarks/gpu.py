"""What one card does with the learner and the Hugging Face engine: `make gpu`, in less than nine minutes.

    python benchmarks/gpu.py [--json FILE] [--only learner,layouts,engine,offload,checkpoint] [--device cpu --tiny]

It needs torch, transformers and this project, and no vLLM, SGLang, network or Redis. The model has the configuration of
Qwen3-0.6B and random weights.

learner     a step of two samples of 16k, then 64k tokens (bfloat16, recomputed activations): tokens per second and MFU,
            next to prime-rl's figures on one H100 80 GB with FlashAttention 3 (benchmarks/baselines/1xh100)
layouts     log-probabilities of responses that share rows, next to those of the plain model on each alone
engine      tokens per second, and its log-probabilities next to the learner's
offload     seconds and memory of leaving the device and of coming back
checkpoint  seconds that training waits for the copy, the first one and a later one, and that the disk takes

What fails is written as its error, and the others go on. `--device cpu --tiny` tries the script itself.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from facts import write_json

from streamrl.config import RunConfig
from streamrl.engine import Request
from streamrl.learner.batch import TrainSample
from streamrl.learner.checkpoint_files import write_shard
from streamrl.learner.policy import Actor
from streamrl.learner.ranks import Ranks
from streamrl.producers.engines.hf import HfEngine
from streamrl.weight_sync.tensors import Version

QWEN3 = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
TINY = {**QWEN3, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 4}
BASELINE = {16384: {"tokens_per_second": 11896, "mfu": 0.11}, 65536: {"tokens_per_second": 10147, "mfu": 0.27}}
"""prime-rl, `benchmark-1xh100-*.json`: Qwen3-0.6B, all weights, FA3, recomputation, two micro-batches, four steps."""
PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}
"""Dense bfloat16 operations per second, as NVIDIA says."""


class Bench:
    def __init__(self, folder: Path, device: str, *, tiny: bool) -> None:
        self.folder, self.device, self.tiny = folder, torch.device(device), tiny
        self.lengths = [128, 256] if tiny else [16384, 65536]
        self.ranks = Ranks(rank=0, world=1, device=self.device, deadline=600)
        config = transformers.Qwen3Config(
            **(TINY if tiny else QWEN3), max_position_embeddings=1 << 17, tie_word_embeddings=True
        )
        config.eos_token_id = config.bos_token_id = config.pad_token_id = None
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.generation_config.eos_token_id = None
        model.save_pretrained(folder / "model")
        self.config = config
        self.weights = model.state_dict()
        self.parameters = model.num_parameters(exclude_embeddings=False)

    def run_config(self, length: int, **learner: Any) -> RunConfig:
        dtype = "float32" if self.device.type == "cpu" else "bfloat16"
        return RunConfig.model_validate(
            {
                "model": {"path": str(self.folder / "model"), "context": length, "dtype": dtype},
                "sampling": {"max_new_tokens": length - 1},
                "engine": {"device": self.device.type, "dtype": dtype, "slots": 64},
                "weights": {"dtype": dtype},
                "learner": {"device": self.device.type, "tokens_per_microbatch": length, **learner},
            }
        )

    def sample(self, group: int, prompt: int, count: int) -> TrainSample:
        random = np.random.default_rng((group, prompt))  # one prompt for a group
        ids = random.integers(0, self.config.vocab_size, prompt, dtype=np.int32)
        tokens = np.random.default_rng().integers(0, self.config.vocab_size, count, dtype=np.int32)
        none = np.zeros(count, dtype=np.float32)
        return TrainSample(group, ids, tokens, none - 11.9, none.astype(np.int64), 1.0, none + 1)

    def learner(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        card = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        peak = next((speed for name, speed in PEAK.items() if name in card), None)
        for length in self.lengths:
            actor = Actor(self.run_config(length, checkpoint_activations=True), self.ranks)
            batch = [self.sample(0, 1, length - 1), self.sample(1, 1, length - 1)]
            self.reset_peak()
            seconds = [self.timed(partial(actor.update_policy, batch)) for _ in range(5)][1:]
            tokens = 2 * length
            speed = tokens / statistics.median(seconds)
            config = self.config
            # Forward and backward: 6 per weight and token; products of attention, half of them behind the mask.
            attention = 6 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * length
            found[str(length)] = {
                "tokens_per_second": round(speed),
                "mfu": None if peak is None else round(speed * (6 * self.parameters + attention) / peak, 3),
                "step_seconds": seconds,
                "peak_gib": self.peak_gib(),
                "prime_rl_h100": BASELINE.get(length),
            }
            del actor
            gc.collect()  # recomputed layers refer to themselves
            self.ranks.give_back_memory()
        return found

    def layouts(self) -> dict[str, Any]:
        """Greatest difference of a log-probability from that of the response alone, in the plain model."""
        length = 64 if self.tiny else 2048
        batch = [self.sample(group, length // 8, length // 4 + 7 * place) for group in range(2) for place in range(4)]
        actor = Actor(self.run_config(length), self.ranks)
        found = actor.compute_log_prob(batch).logprobs
        del actor
        plain = transformers.AutoModelForCausalLM.from_pretrained(self.folder / "model", dtype=torch.float32)
        plain = plain.to(self.device).eval()
        worst = 0.0
        for sample, ours in zip(batch, found, strict=True):
            ids = torch.from_numpy(np.concatenate([sample.prompt, sample.tokens]).astype(np.int64)).to(self.device)
            with torch.no_grad():
                logprobs = plain(input_ids=ids[None]).logits[0].float().log_softmax(-1)
            theirs = logprobs[len(sample.prompt) - 1 : -1].gather(1, ids[len(sample.prompt) :, None])[:, 0]
            worst = max(worst, float(np.abs(ours - theirs.cpu().numpy()).max()))
        return {"greatest_difference": worst, "type": self.run_config(length).model.dtype}

    def engine(self) -> dict[str, Any]:
        return asyncio.run(self._engine())

    async def _engine(self) -> dict[str, Any]:
        prompt, count, requests = (8, 24, 8) if self.tiny else (128, 512, 64)
        config = self.run_config(prompt + count)
        engine = HfEngine(config, seed=0)
        await engine.start()
        try:
            dtype = getattr(torch, config.engine.dtype)
            weights = {name: weight.to(dtype) for name, weight in self.weights.items() if name != "lm_head.weight"}
            await engine.apply(Version((1, 1), 1, weights))
            prompts = [self.sample(group, prompt, 1).prompt for group in range(requests)]
            started = time.perf_counter()
            asked = (engine.generate(Request(str(place), ids, count)) for place, ids in enumerate(prompts))
            done = await asyncio.gather(*asked)
            seconds = time.perf_counter() - started
        finally:
            await engine.close()
        samples = []
        for group, (ids, one) in enumerate(zip(prompts, done, strict=True)):
            none = np.zeros(len(one.tokens), dtype=np.float32)
            samples.append(TrainSample(group, ids, one.tokens, one.logprobs, none.astype(np.int64), 1.0, none))
        learnt = Actor(config, self.ranks).compute_log_prob(samples).logprobs
        apart = np.concatenate([np.abs(ours - one.logprobs) for ours, one in zip(learnt, done, strict=True)])
        return {
            "tokens_per_second": round(sum(len(one.tokens) for one in done) / seconds),
            "logprob_difference": {"mean": float(apart.mean()), "greatest": float(apart.max())},
        }

    def offload(self) -> dict[str, Any]:
        actor = Actor(self.run_config(self.lengths[0]), self.ranks)
        there = self.allocated()
        rounds = []
        for _ in range(3):
            away = self.timed(actor.to_host)
            kept = self.ranks.give_back_memory()
            rounds.append({"away_seconds": away, "reserved_bytes": kept, "back_seconds": self.timed(actor.to_device)})
        return {"allocated_bytes": there, "rounds": rounds}

    def checkpoint(self) -> dict[str, Any]:
        actor = Actor(self.run_config(self.lengths[0]), self.ranks)
        copies = [self.timed(actor.shard_state) for _ in range(3)]
        state = actor.shard_state()
        disk = self.timed(lambda: write_shard(self.folder / "shard.safetensors", state))
        size = sum(tensor.nbytes for tensor in state.values())
        return {"bytes": size, "copy_seconds": copies, "disk_seconds": disk}

    def timed(self, work: Callable[[], object]) -> float:
        self.ranks.finish()
        started = time.perf_counter()
        work()
        self.ranks.finish()
        return time.perf_counter() - started

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_gib(self) -> float | None:
        if self.device.type != "cuda":
            return None
        return round(torch.cuda.max_memory_allocated(self.device) / 2**30, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="learner,layouts,engine,offload,checkpoint")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --device cpu --tiny tries the script")
    if args.tiny:
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), args.device, tiny=args.tiny)
        cuda = bench.device.type == "cuda"
        results: dict[str, Any] = {
            "card": torch.cuda.get_device_name(bench.device) if cuda else "CPU",
            "torch": torch.__version__,
        }
        for name in args.only.split(","):
            try:
                results[name] = getattr(bench, name)()
            except Exception as error:  # noqa: BLE001 (the next part may work)
                results[name] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-2000:]}
            print(name, results[name], flush=True)
            gc.collect()
            bench.ranks.give_back_memory()
        bench.ranks.close()
    if args.json is not None:
        write_json(args.json, results)


if __name__ == "__main__":
    main()
