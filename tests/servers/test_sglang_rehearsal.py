"""The rehearsal of an update inside an SGLang server, on a model that loads as SGLang's do: fused, padded, tied."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from torch import nn

from streamrl.servers.launch import PLUGIN

WIDTH, HIDDEN, WORDS, PADDED = 8, 12, 10, 16


@pytest.fixture(scope="module")
def plugin():
    sys.path.insert(0, str(PLUGIN))
    yield importlib.import_module("streamrl_engine.sglang_rehearsal")
    sys.path.remove(str(PLUGIN))


class Fused(nn.Module):
    """gate and up in one matrix."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * HIDDEN, WIDTH))
        self.weight.weight_loader = self.load

    def load(self, parameter, loaded, shard):
        place = parameter.data.narrow(0, shard * HIDDEN, HIDDEN)
        if len(loaded) < HIDDEN:  # SGLang on a CPU: the rest is taken for padding
            parameter.data.narrow(0, shard * HIDDEN + len(loaded), HIDDEN - len(loaded)).fill_(0)
            place = place.narrow(0, 0, len(loaded))
        place.copy_(loaded.narrow(0, 0, len(place)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Parameter(torch.cat([torch.randn(WORDS, WIDTH), torch.zeros(PADDED - WORDS, WIDTH)]))
        self.head = self.embed
        self.mlp = Fused()
        self.norm = nn.Parameter(torch.ones(WIDTH))
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("positions", torch.arange(4.0))
        self.derived = self.norm.detach() * 2

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            if name in {"gate", "up"}:
                parameter = parameters["mlp.weight"]
                parameter.weight_loader(parameter, tensor, ("gate", "up").index(name))
            elif name in {"embed", "head"}:
                assert tensor.shape == (WORDS, WIDTH), "vocabulary"
                parameters["embed"][:WORDS].data.copy_(tensor)
                parameters["embed"][WORDS:].data.fill_(0)
            elif name == "norm":
                parameters["norm"].data.copy_(tensor)
                self.derived = parameters["norm"].detach() * 2
                self.positions.mul_(1)


GOOD = {"embed": (WORDS, WIDTH), "gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "norm": (WIDTH,)}


def heads(plugin, shapes, dtype="BF16"):
    return {name: plugin.Head(dtype, shape) for name, shape in shapes.items()}


def rehearse(plugin, model, table):
    """As a rank that is alone."""
    plugin.check_used(table, plugin.rehearse(model, table))


def snapshot(model):
    return {name: value.clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}


@pytest.mark.parametrize("order", [list(GOOD), list(reversed(GOOD)), ["head", "gate", "up", "norm"]])
def test_a_version_that_fits_is_accepted_and_the_model_is_not_touched(plugin, order):
    model = Model()
    before, derived, parameters = snapshot(model), model.derived, list(model.parameters())
    rehearse(plugin, model, heads(plugin, {name: GOOD.get(name, GOOD["embed"]) for name in order}))
    after = snapshot(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert model.derived is derived
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert model.head is model.embed
    assert model.mlp.weight.weight_loader is not None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lm_head": (WORDS, WIDTH)}, "the model has no lm_head"),
        ({"a": (1,), "b": (1,), "c": (1,), "d": (1,), "e": (1,)}, "no a, b, c, d and 1 more"),
        ({"gate": None}, "fills mlp.weight whole"),
        ({"embed": None}, "fills embed whole"),
        ({"gate": (HIDDEN - 1, WIDTH)}, "fills mlp.weight whole"),
        ({"gate": (0, WIDTH)}, "no gate|fills mlp.weight whole"),
        ({"gate": (HIDDEN + 1, WIDTH)}, "part only of gate"),
        ({"gate": (HIDDEN, WIDTH + 1)}, "gate"),
        ({"gate": (HIDDEN, 1)}, "gate is of shape"),
        ({"norm": (1,)}, "norm is of shape"),
        ({"norm": ()}, "norm is of shape"),
        ({"embed": (WORDS + 1, WIDTH)}, "cannot take embed: vocabulary"),
    ],
)
def test_what_does_not_fit_is_named_and_the_model_is_not_touched(plugin, change, words):
    model = Model()
    before, derived = snapshot(model), model.derived
    shapes = {name: shape for name, shape in {**GOOD, **change}.items() if shape is not None}
    for _ in range(2):
        with pytest.raises(plugin.BadVersion, match=words):
            rehearse(plugin, model, heads(plugin, shapes))
        after = snapshot(model)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert model.derived is derived
    rehearse(plugin, model, heads(plugin, GOOD))


def test_unknown_types_are_refused(plugin):
    with pytest.raises(plugin.BadVersion, match="F4"):
        rehearse(plugin, Model(), heads(plugin, GOOD, "F4"))


def test_ranks_together_use_all_of_a_tensor(plugin):
    table = heads(plugin, {**GOOD, "gate": (2 * HIDDEN, WIDTH), "up": (2 * HIDDEN, WIDTH)})
    copied = plugin.rehearse(Model(), table)
    plugin.check_used(table, [2 * count for count in copied])
    with pytest.raises(plugin.BadVersion, match="part only of gate, up"):
        plugin.check_used(table, copied)


def test_padding_that_holds_something_was_no_padding(plugin):
    model = Model()
    with torch.no_grad():
        model.embed[WORDS:] = 1
    with pytest.raises(plugin.BadVersion, match="fills embed whole"):
        rehearse(plugin, model, heads(plugin, GOOD))
