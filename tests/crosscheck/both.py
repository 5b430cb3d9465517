"""One batch in the layout of each side, streamrl's with shared prompts and trl's padded, and both answers.

    make crosscheck && .venv/bin/python tests/crosscheck/both.py

asks trl and writes its answers into `trl.safetensors`, which tests compare ours with.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import CAP, CASES, LONGEST, REWARDS, Case
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from streamrl.config.learner import CorrectionConfig, KlConfig
from streamrl.learner.algorithms.corrections import Corrections
from streamrl.learner.algorithms.losses import LOSSES, LossResult
from streamrl.learner.algorithms.recipe import normaliser, objective, token_weights
from streamrl.learner.algorithms.tokens import Tokens
from streamrl.learner.batch import RowLimits, TrainSample, pack
from streamrl.learner.model import LogProbModel

STORED = Path(__file__).parent / "trl.safetensors"
"""Answers of trl: losses, and what is per token."""
PYTHON = Path(__file__).parents[2] / ".crosscheck" / "bin" / "python"
PER_TOKEN = ("logprobs", "values")
VOCABULARY, PAD = 61, 0
GROUPS, SIZE = 2, 4


@dataclass(frozen=True)
class Terms:
    """What `objective` needs of a recipe."""

    loss: Callable[[Tokens], LossResult]
    corrections: Corrections
    kl: KlConfig
    entropy: float


class Both:
    """Inputs on disk for trl, and the answers of both sides."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_model(folder / "model")
        self.samples = make_samples()
        generator = torch.Generator().manual_seed(5)
        count = sum(len(sample.tokens) for sample in self.samples)
        model = self._model()
        with torch.no_grad():
            present = torch.cat([logprobs for logprobs, _, _ in self._forward(model)])
        order = np.concatenate([part.samples for part in self._parts()])
        # Near enough for ratios on both sides of every bound.
        noise = 0.4 * torch.randn(3, count, generator=generator)
        self.old = self._in_order(present + noise[0], order)
        self.reference = self._in_order(present + noise[1], order)
        self.behaviour = self._in_order(present + noise[0] + noise[2], order)

    def write(self) -> None:
        """Write what trl reads: prompts padded on the left, responses on the right."""
        prompts = [sample.prompt for sample in self.samples]
        responses = [sample.tokens for sample in self.samples]
        width = max(map(len, prompts))
        inputs = {
            "prompt_ids": torch.tensor([[PAD] * (width - len(ids)) + ids.tolist() for ids in prompts]),
            "prompt_mask": torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]),
            "completion_ids": padded([torch.from_numpy(ids).long() for ids in responses]),
            "completion_mask": padded([torch.ones(len(ids), dtype=torch.long) for ids in responses]),
            "advantages": torch.tensor([float(sample.advantages[0]) for sample in self.samples]),
            "num_items_in_batch": torch.tensor(sum(map(len, responses))),
            "old_per_token_logps": padded(self.old),
            "ref_per_token_logps": padded(self.reference),
            "importance_sampling_ratio": (padded(self.old) - padded(self.behaviour)).exp().clamp(max=CAP),
        }
        save_file(inputs, self.folder / "inputs.safetensors")
        cases = {
            name: {"config": case.trl | {"max_completion_length": LONGEST}, "inputs": case.inputs}
            for name, case in CASES.items()
        }
        (self.folder / "cases.json").write_text(json.dumps(cases))
        (self.folder / "rewards.json").write_text(json.dumps(REWARDS))

    def ask(self) -> None:
        """Have trl answer, in its own environment."""
        self.write()
        command = [PYTHON, Path(__file__).parent / "trl_side.py", self.folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        self.read()

    def store(self) -> None:
        """Keep what trl answered, but for the gradients of its parameters, which are large."""
        kept = {key: value for key, value in self.gradients.items() if key.partition("|")[2] in PER_TOKEN}
        about = {"losses": self.losses, "advantages": self.advantages, "versions": self.versions}
        save_file(kept, STORED, {name: json.dumps(value) for name, value in about.items()})

    def recall(self) -> None:
        """Read what was kept."""
        self.gradients = load_file(STORED)
        with safe_open(STORED, "pt") as file:
            about = {name: json.loads(value) for name, value in file.metadata().items()}
        self.losses, self.advantages, self.versions = about["losses"], about["advantages"], about["versions"]

    def read(self) -> None:
        """Read what trl wrote."""
        self.losses: dict[str, float] = json.loads((self.folder / "losses.json").read_text())
        self.advantages: dict[str, list[float]] = json.loads((self.folder / "advantages.json").read_text())
        self.gradients = load_file(self.folder / "gradients.safetensors")
        self.versions: dict[str, str] = json.loads((self.folder / "versions.json").read_text())

    def theirs(self, name: str) -> tuple[float, torch.Tensor, dict[str, torch.Tensor]]:
        """Loss, gradient to each log-probability (responses one behind the other), gradients to the parameters."""
        prefix = f"{name}|"
        found = {key.removeprefix(prefix): value for key, value in self.gradients.items() if key.startswith(prefix)}
        self.their_values = self._unpadded(found.pop("values"))
        return self.losses[name], self._unpadded(found.pop("logprobs")), found

    def ours(self, case: Case) -> tuple[float, torch.Tensor, dict[str, torch.Tensor]]:
        """The same from streamrl's own parts, in the same order."""
        name, options = case.loss
        terms = Terms(
            loss=LOSSES.resolve(name, options),
            corrections=Corrections.of(CorrectionConfig.model_validate(case.correction)),
            kl=KlConfig.model_validate(case.kl),
            entropy=case.entropy,
        )
        count = sum(len(sample.tokens) for sample in self.samples)
        divisor = normaliser(case.aggregate, tokens=count, responses=len(self.samples))  # type: ignore[arg-type]
        model = self._model()
        total = 0.0
        slopes: list[torch.Tensor] = [torch.zeros(0)] * len(self.samples)
        self.our_values: list[torch.Tensor] = [torch.zeros(0)] * len(self.samples)
        for logprobs, entropy, part in self._forward(model, entropy=bool(case.entropy)):
            logprobs.retain_grad()
            weights = torch.from_numpy(token_weights(part.counts, case.aggregate, LONGEST))  # type: ignore[arg-type]
            tokens = self._tokens(logprobs, entropy, part, case)
            result = objective(tokens, terms, terms.kl.coefficient, weights=weights)
            loss = result.per_token.sum() / divisor
            loss.backward()
            total += loss.item()
            assert logprobs.grad is not None
            for target, values in ((slopes, logprobs.grad), (self.our_values, logprobs.detach())):
                for index, piece in zip(part.samples, values.split(part.counts.tolist()), strict=True):
                    target[index] = piece
        parameters = {
            key.removeprefix("model."): value.grad for key, value in model.named_parameters() if value.grad is not None
        }
        return total, torch.cat(slopes), parameters

    def _tokens(self, logprobs: torch.Tensor, entropy: torch.Tensor | None, part: Any, case: Case) -> Tokens:
        def of(responses: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat([responses[index] for index in part.samples])

        old = of(self.old) if case.inputs else logprobs.detach()
        counts = torch.from_numpy(part.counts)
        return Tokens(
            logprobs=logprobs,
            old=old,
            proximal=old,
            behaviour=of(self.behaviour) if "importance_sampling_ratio" in case.inputs else old,
            advantages=torch.from_numpy(part.advantages),
            sequence=torch.arange(len(counts)).repeat_interleave(counts),
            counts=counts,
            ages=torch.zeros(len(logprobs), dtype=torch.int64),
            reference=of(self.reference),
            entropy=entropy,
        )

    def _model(self) -> LogProbModel:
        plain = AutoModelForCausalLM.from_pretrained(self.folder / "model", attn_implementation="eager")
        return LogProbModel(plain, temperature=1.0, chunk=16)

    def _parts(self) -> list[Any]:
        return pack(self.samples, RowLimits(tokens=96, longest=128, shared=128, hidden=32))

    def _forward(self, model: LogProbModel, *, entropy: bool = False) -> Any:
        for part in self._parts():
            assert part.shared
            logprobs, spread = model(
                input_ids=torch.from_numpy(part.input_ids),
                visible_until=torch.from_numpy(part.visible_until),
                position_ids=torch.from_numpy(part.position_ids),
                positions=torch.from_numpy(part.positions),
                targets=torch.from_numpy(part.targets),
                entropy=entropy,
                entropy_gradient=entropy,
            )
            yield logprobs, spread, part

    def _in_order(self, values: torch.Tensor, order: np.ndarray[Any, Any]) -> list[torch.Tensor]:
        """Cut tokens in the order of micro-batches into responses in the order of the samples."""
        pieces = values.split([len(self.samples[index].tokens) for index in order])
        return [piece for _, piece in sorted(zip(order.tolist(), pieces, strict=True), key=lambda pair: pair[0])]

    def _unpadded(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([row[: len(sample.tokens)] for row, sample in zip(rows, self.samples, strict=True)])


def make_model(folder: Path) -> None:
    """Write a tiny model with large random weights, and a tokenizer that trl asks for and nobody uses."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    model.save_pretrained(folder)
    words = models.WordLevel({"<pad>": PAD, "<bos>": 1, "<eos>": 2, "a": 3}, unk_token="<pad>")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.save_pretrained(folder)


def make_samples() -> list[TrainSample]:
    """Groups whose responses share a prompt, differ in length and have advantages of both signs."""
    random = np.random.default_rng(1)

    def ids(count: int) -> np.ndarray[Any, Any]:
        return random.integers(3, VOCABULARY, count).astype(np.int32)

    samples = []
    for group_id in range(GROUPS):
        prompt = ids(5 + 4 * group_id)
        for _ in range(SIZE):
            count = int(random.integers(1, LONGEST + 1))
            samples.append(
                TrainSample(
                    group_id=group_id,
                    prompt=prompt,
                    tokens=ids(count),
                    logprobs=np.zeros(count, dtype=np.float32),
                    steps=np.zeros(count, dtype=np.int64),
                    reward=0.0,
                    advantages=np.full(count, random.normal(), dtype=np.float32),
                )
            )
    return samples


def padded(rows: list[torch.Tensor]) -> torch.Tensor:
    """Pad on the right with zeros."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        asked = Both(Path(place))
        asked.ask()
        asked.store()
