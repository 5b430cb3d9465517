"""Quantised versions (`weights.quantize`): which weights, how, and what a server is told of it when it starts.

A projection (`QUANTISED`) becomes two tensors, values of 8 bits and scales in float32; embeddings, heads, norms and
biases stay as they are. The server quantises its activations by itself, token by token.

```
int8         NAME.weight int8, NAME.weight_scale [out, 1]              compressed-tensors W8A8
fp8_channel  NAME.weight e4m3, NAME.weight_scale [out, 1]              compressed-tensors FP8
fp8_block    NAME.weight e4m3, NAME.weight_scale_inv [out/128, in/128] quant_method fp8; the last blocks may be smaller
```
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from streamrl.config import Quantize

if TYPE_CHECKING:  # a process that only keeps servers does without torch
    import torch

QUANTISED: Final = r".*_proj"
"""Modules that are quantised, by name; publisher and servers read the same pattern."""
BLOCK: Final = 128
_LARGEST: Final = {"int8": 127, "fp8_channel": 448, "fp8_block": 448}


def quantization_config(kind: Quantize) -> dict[str, Any]:
    """What `config.json` of a model with such weights says; vLLM and SGLang take it as an override."""
    if kind == "fp8_block":
        sizes = [BLOCK, BLOCK]
        return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": sizes}
    about = {"num_bits": 8, "type": "int" if kind == "int8" else "float", "symmetric": True}
    group = {
        "targets": [f"re:{QUANTISED}$"],
        "weights": {**about, "strategy": "channel", "dynamic": False},
        "input_activations": {**about, "strategy": "token", "dynamic": True},
    }
    form = "int-quantized" if kind == "int8" else "float-quantized"
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": []}


def quantise_all(kind: Quantize, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the quantised version; those that stay as they are are the same objects."""
    for name, tensor in tensors:
        module = name.removesuffix(".weight")
        if module == name or tensor.ndim != 2 or not re.fullmatch(QUANTISED, module):
            yield name, tensor
            continue
        values, scales = quantise(kind, tensor)
        yield name, values
        yield f"{name}_scale{'_inv' if kind == 'fp8_block' else ''}", scales


def quantise(kind: Quantize, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of a finite matrix, of its shape, and a scale of each of its rows or blocks: values x scale is the matrix.

    No value is off by more than half a step of its type at its size. A row or block of zeros stays zero.
    """
    import torch

    rows, columns = weight.shape
    high, wide = (BLOCK, BLOCK) if kind == "fp8_block" else (1, columns)
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % wide, 0, -rows % high))
    blocks = padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
    largest = _LARGEST[kind]
    scales = (blocks.abs().amax((1, 3)) / largest).clamp_min(torch.finfo(torch.float32).tiny)
    scaled = (blocks / scales[:, None, :, None]).clamp_(-largest, largest).view_as(padded)[:rows, :columns]
    dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
    return (scaled.round() if kind == "int8" else scaled).to(dtype).contiguous(), scales
