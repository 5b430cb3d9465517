"""The image side of a vision-language model: how many tokens an image becomes, where they stand, and its pixels.

```
text of a chat  -> expand           one placeholder for each image becomes all of its tokens
token ids       -> spans, positions where the images stand, and the rotary positions of all tokens
encoded image   -> pixels           what the model's forward pass takes; each image once (`processed` counts)
```
Models are known by family, because each expands and numbers the tokens of an image in its own way.
"""

from __future__ import annotations

import hashlib
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import orjson
from typing_extensions import override

from streamrl.config import ModelConfig
from streamrl.errors import ConfigError, DataError
from streamrl.images.encoded import EncodedImage, blank, decode

Size: TypeAlias = tuple[int, int]
"""Width and height of an encoded image."""
Pixels: TypeAlias = dict[str, npt.NDArray[Any]]
"""Arguments of a model's forward pass."""
Ids: TypeAlias = Sequence[int] | npt.NDArray[np.int32]
Span: TypeAlias = tuple[int, int]
"""First token and number of tokens."""
_KEPT_BYTES: Final = 256 << 20


class Vision(ABC):
    """Of one model; `token_id` is that of the placeholder, and no token of `forbidden` may ever be sampled.

    `around`: the tokens before and behind those of an image, where the model has such.
    """

    modules: ClassVar[tuple[str, ...]]  # of the base model that see images alone
    axes = 1  # of its rotary positions
    join_axis = 0  # along which the pixels of several images are put together

    def __init__(self, described: dict[str, Any], backend: Any, processor: Any) -> None:
        self._backend, self._processor = backend, processor
        self.token_id = int(described["image_token_id"])
        self.token = str(backend.convert_ids_to_tokens(self.token_id))
        others = [described.get(name) for name in ("video_token_id",)]
        self.forbidden = tuple(sorted({self.token_id, *(int(other) for other in others if other is not None)}))
        self.around = tuple(described.get(name) for name in ("vision_start_token_id", "vision_end_token_id"))
        settings = orjson.dumps([type(self).__name__, processor.to_dict()], option=orjson.OPT_SORT_KEYS)
        self.fingerprint = hashlib.blake2b(settings, digest_size=8).hexdigest()
        self.processed = 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Pixels] = OrderedDict()
        self._kept_bytes = 0
        self.tokens_of = lru_cache(4096)(self._tokens_of)

    @abstractmethod
    def expansion(self, size: Size) -> str:
        """The text that stands for one image."""

    @abstractmethod
    def _process(self, image: Any) -> Pixels: ...

    @abstractmethod
    def positions(self, ids: Ids, pixels: Sequence[Pixels]) -> tuple[npt.NDArray[np.int64], int]:
        """Rotary positions of ids that begin at 0, shape (axes, n), and that of the token behind them.

        Of `pixels` it reads what `outline` gives.
        """

    def outline(self, size: Size) -> Pixels:
        """What `positions` needs of an image, without its pixels."""
        del size
        return {}

    def expand(self, text: str, sizes: Sequence[Size]) -> str:
        """Replace each placeholder by the tokens of its image. `DataError`: they are not as many as the images."""
        pieces = text.split(self.token)
        if len(pieces) != len(sizes) + 1:
            what = f"{len(pieces) - 1} placeholders {self.token} for {len(sizes)} images"
            raise DataError(what, "each image needs one place in the text, and the template has to write it")
        whole = pieces[0]
        for size, piece in zip(sizes, pieces[1:], strict=True):
            try:
                whole += self.expansion(size) + piece
            except ValueError as error:  # Qwen takes no image that is 200 times as long as wide
                raise DataError(f"an image of {size[0]} x {size[1]} pixels that the model refuses: {error}") from error
        return whole

    def spans(self, ids: Sequence[int], sizes: Sequence[Size]) -> list[Span]:
        """Where the images stand in token ids. `DataError`: not these images are there."""
        listed, found, at = list(ids), [], 0
        for size in sizes:
            wanted = self.tokens_of(size)
            while listed[at : at + len(wanted)] != wanted:
                try:
                    at = listed.index(wanted[0], at + 1)
                except ValueError:
                    raise DataError("an image that does not have its tokens in the prompt") from None
            found.append((at, len(wanted)))
            at += len(wanted)
        inside = sum(listed[begin : begin + count].count(self.token_id) for begin, count in found)
        if inside != listed.count(self.token_id):
            raise DataError("a prompt with tokens of more images than it has")
        return found

    def pixels(self, name: str, data: bytes) -> Pixels:
        """What the forward pass gets of the image with this hash; kept for the next time. From any thread."""
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
                return self._kept[name]
            made = self._kept[name] = self._process(decode(data))
            self.processed += 1
            self._kept_bytes += _bytes(made)
            while len(self._kept) > 1 and self._kept_bytes > _KEPT_BYTES:
                self._kept_bytes -= _bytes(self._kept.popitem(last=False)[1])
            return made

    def save(self, folder: Path) -> None:
        """Write the image processor, so that the model in this folder makes the same pixels."""
        self._processor.save_pretrained(folder)

    @cached_property
    def smallest(self) -> EncodedImage:
        """An image of one pixel."""
        return blank(1, 1)

    def joined(self, pixels: Sequence[Pixels]) -> Pixels:
        """Those of several images, in the order in which they stand in the rows of a pass."""
        return {key: np.concatenate([each[key] for each in pixels], axis=self.join_axis) for key in pixels[0]}

    def ids(self, text: str) -> list[int]:
        found: list[int] = self._backend(text, add_special_tokens=False, verbose=False)["input_ids"]
        return found

    def _tokens_of(self, size: Size) -> list[int]:
        return self.ids(self.expansion(size))


class GridVision(Vision):
    """Qwen: an image is a grid of tokens, numbered by row and column; text goes on behind the longer side."""

    modules = ("visual",)
    axes = 3

    @override
    def expansion(self, size: Size) -> str:
        width, height = size
        patches = self._processor.get_number_of_image_patches(height, width, {})
        return self.token * int(patches // self._processor.merge_size**2)

    @override
    def outline(self, size: Size) -> Pixels:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        each, limits = self._processor.patch_size, self._processor.size
        bounds = limits["shortest_edge"], limits["longest_edge"]
        sides = smart_resize(size[1], size[0], each * self._processor.merge_size, *bounds)
        return {"image_grid_thw": np.asarray([[1, *(side // each for side in sides)]])}

    @override
    def _process(self, image: Any) -> Pixels:
        found = self._processor([image], return_tensors="np")
        return {key: np.asarray(found[key]) for key in ("pixel_values", "image_grid_thw")}

    @override
    def positions(self, ids: Ids, pixels: Sequence[Pixels]) -> tuple[npt.NDArray[np.int64], int]:
        places = np.empty((3, len(ids)), dtype=np.int64)
        tokens, end, position = np.asarray(ids), 0, 0
        starts = np.flatnonzero(tokens == self.token_id)
        for image in pixels:
            start = int(starts[np.searchsorted(starts, end)])
            frames, rows, columns = image["image_grid_thw"][0] // (
                1,
                self._processor.merge_size,
                self._processor.merge_size,
            )
            places[:, end:start] = position + np.arange(start - end)
            position += start - end
            end = start + int(frames * rows * columns)
            places[:, start:end] = position + np.indices((frames, rows, columns)).reshape(3, -1)
            position += int(max(rows, columns))
        places[:, end:] = position + np.arange(len(ids) - end)
        return places, position + len(ids) - end


class TileVision(Vision):
    """Idefics3 and SmolVLM: an image is rows of tiles and the whole, each of so many tokens between marks."""

    modules = ("vision_model", "connector")
    join_axis = 1

    def __init__(self, described: dict[str, Any], backend: Any, processor: Any) -> None:
        super().__init__(described, backend, processor)
        vision = described["vision_config"]
        side = vision["image_size"] // vision["patch_size"] // described.get("scale_factor", 2)
        self._each = side * side

    @override
    def expansion(self, size: Size) -> str:
        from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

        width, height = size
        _, rows, columns = self._processor.get_number_of_image_patches(height, width, {})
        if not self._processor.do_image_splitting:
            rows = columns = 0
        marks = {
            "fake_token_around_image": "<fake_token_around_image>",
            "image_token": self.token,
            "global_image_token": getattr(self._backend, "global_image_token", "<global-img>"),
        }
        text: str = get_image_prompt_string(rows, columns, self._each, **marks)
        return text

    @override
    def _process(self, image: Any) -> Pixels:
        found = self._processor([[image]], return_tensors="np")
        return {key: np.asarray(found[key]) for key in ("pixel_values", "pixel_attention_mask")}

    @override
    def positions(self, ids: Ids, pixels: Sequence[Pixels]) -> tuple[npt.NDArray[np.int64], int]:
        del pixels
        return np.arange(len(ids))[None], len(ids)


_FAMILIES: Final[dict[str, type[Vision]]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), GridVision),
    **dict.fromkeys(("idefics3", "smolvlm"), TileVision),
}


def vision_of(model: ModelConfig, backend: Any = None) -> Vision | None:
    """The image side of a model, with this tokenizer or the one that it names; None: it takes text alone.

    `ConfigError`: images go into it in a way that is not known here, or its image processor cannot be loaded.
    """
    described = describe(model)
    if "vision_config" not in described:
        return None
    from transformers import AutoImageProcessor, AutoTokenizer

    family = _FAMILIES.get(str(described.get("model_type")))
    if family is None:
        what = f"{model.path} is a vision-language model of the kind {described.get('model_type')!r}"
        raise ConfigError(f"{what}, whose images are not known", f"known are {', '.join(_FAMILIES)}")
    try:
        backend = backend or AutoTokenizer.from_pretrained(model.tokenizer or model.path)
        processor = AutoImageProcessor.from_pretrained(model.path, backend="pil", **model.image_processor)
        vision = family(described, backend, processor)
        vision.expansion((64, 64))
        vision.outline((64, 64))
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        what = f"the image processor of {model.path} cannot be loaded: {str(error).partition(chr(10))[0]}"
        hint = "model.path needs its preprocessor_config.json, model.image_processor keys that it has, each whole"
        raise ConfigError(what, hint) from error
    return vision


def auto_class(model: ModelConfig) -> Any:
    """The class of transformers that loads a model, with its image side where it has one."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if "vision_config" in describe(model) else AutoModelForCausalLM


def describe(model: ModelConfig) -> dict[str, Any]:
    """The configuration of a model, of a folder or the hub; empty where it cannot be read."""
    from transformers import PreTrainedConfig

    try:
        described: dict[str, Any] = PreTrainedConfig.get_config_dict(model.path)[0]
    except (OSError, ValueError):
        return {}  # whoever loads the model says what is wrong
    return described


def _bytes(pixels: Pixels) -> int:
    return sum(array.nbytes for array in pixels.values())
