"""Weights on their way into our own server, a real process: files with and without a manifest, and pulls."""

from __future__ import annotations

import asyncio

import pytest
import torch
from serve_kit import TOKEN, client_of, completion_of, request

from streamrl.errors import WeightsError
from streamrl.weight_sync.manifest import Manifest, TensorEntry, encode
from streamrl.weight_sync.serve import ShardServer, listen
from streamrl.weight_sync.tensors import Version, write_tensors
from tests.engines import tiny

torch.set_num_threads(1)
pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_nobody_is_lost_while_versions_come(served, version):
    made = [version(seed) for seed in range(10, 20)]
    judges = {one.number: judge for one, judge in made}
    async with served.engine() as engine:
        await engine.apply(made[0][0])
        tasks = [asyncio.create_task(engine.generate(request(str(k), 3 + k, 200, seed=k))) for k in range(48)]
        for one, _ in made[1:]:
            await engine.apply(one)
        for k, task in enumerate(tasks):
            done = await task
            assert len(done.tokens) == 200
            assert tiny.worst_error(judges, request("", 3 + k, 200, seed=k).tokens.tolist(), done) < 1e-4


async def test_refused_weights_change_nothing(served, version, tmp_path):
    (good, judge), (bad, _) = version(20), version(21)
    weights = dict(bad.tensors)
    name = "model.layers.1.mlp.up_proj.weight"

    def broken(number: int, tensors: dict[str, torch.Tensor], **changes: object) -> Version:
        made = tiny.make_version(tmp_path / "bad", number, tensors)
        return Version((1, number), 1, made.tensors, made.folder, made.files, changes.get("parts", made.parts))

    top = bad.number
    async with served.engine() as engine:
        await engine.apply(good)
        for k, (tensors, says) in enumerate(
            [
                (weights | {"unknown": torch.ones(2)}, "does not have"),
                ({key: value for key, value in weights.items() if key != name}, "missing"),
                (weights | {name: torch.full_like(weights[name], float("nan"))}, "finite"),
                (weights | {name: weights[name].T.contiguous()}, "shape"),
            ]
        ):
            with pytest.raises(WeightsError, match=says):
                await engine.apply(broken(top + k, tensors))
        with pytest.raises(WeightsError, match="other tensors"):
            parts = {key: value for key, value in bad.parts.items() if key != name}
            await engine.apply(broken(top + 5, weights, parts=parts))
        (good.folder / "model.safetensors").rename(tmp_path / "moved")
        gone = Version((1, top + 6), 1, good.tensors, good.folder, good.files, good.parts)
        with pytest.raises(WeightsError, match="cannot be fetched"):
            await engine.apply(gone)
        done = await engine.generate(request("after", limit=30))
        assert done.runs == [(0, good.number)]
        assert tiny.worst_error({good.number: judge}, request("").tokens.tolist(), done) < 1e-4
    async with client_of(served) as client:
        body = {"pair": [1, 500], "step": 1, "folder": "/tmp", "files": [], "parts": {}}
        status, said = await client.post("/weights/update", body | {"run": "another"})
        assert (status, said["error"]["kind"]) == (422, "weights")
        assert "serves one run" in said["error"]["hint"]


def _publish(root, number, weights) -> Manifest:
    """A version as the learner's ranks publish it: two files, the embeddings cut between them."""
    folder = root / f"v-1-{number}"
    folder.mkdir(parents=True)
    name = "model.embed_tokens.weight"
    halves = [weights[name][:100].contiguous(), weights[name][100:].contiguous()]
    rest = [(key, value) for key, value in weights.items() if key != name]
    shards = [
        write_tensors(folder / "a.safetensors", [(name, halves[0]), *rest], durable=False),
        write_tensors(folder / "b.safetensors", [(name, halves[1])], durable=False),
    ]
    tensors = [TensorEntry(name, "BF16", list(weights[name].shape), [0, 1])]
    tensors += [TensorEntry(key, "BF16", list(value.shape), [0]) for key, value in rest]
    manifest = Manifest(
        run="mine", version=number, epoch=1, step=number, transport="http", folder=folder.name,
        shards=shards, tensors=tensors,
    )  # fmt: skip
    (folder / "manifest.json").write_bytes(encode(manifest))
    return manifest


def _message(manifest: Manifest, folder, **more):
    return {
        "run": "mine",
        "pair": list(manifest.pair),
        "step": 1,
        "folder": str(folder),
        "files": [shard.file for shard in manifest.shards],
        "parts": {t.name: [manifest.shards[k].file for k in t.parts] for t in manifest.tensors},
        **more,
    }


async def test_parts_with_a_manifest_are_proved(served, versions, tmp_path):
    number = versions.number()
    weights = tiny.random_weights(30)
    manifest = _publish(tmp_path, number, weights)
    folder = tmp_path / manifest.folder
    data = bytearray((folder / "b.safetensors").read_bytes())
    data[-1] ^= 1
    async with client_of(served) as client:
        (folder / "b.safetensors").write_bytes(data)
        status, said = await client.post("/weights/prefetch", _message(manifest, folder))
        assert (status, said["error"]["kind"]) == (422, "weights")
        assert "checksum" in said["error"]["message"]
        data[-1] ^= 1
        (folder / "b.safetensors").write_bytes(data)
        assert (await client.post("/weights/prefetch", _message(manifest, folder)))[0] == 200
        assert await client.post("/weights/update", _message(manifest, folder)) == (200, {"version": number})
        # without a manifest, what is listed still has to be there
        (folder / "manifest.json").unlink()
        again = _message(manifest, folder, pair=[1, versions.number()])
        assert (await client.post("/weights/update", again))[0] == 200
        parts = again["parts"] | {"model.norm.weight": ["b.safetensors"]}
        status, said = await client.post("/weights/update", again | {"parts": parts})
        assert status == 422
    async with served.engine() as engine:
        done = await engine.generate(request("a", limit=40))
        judge = {again["pair"][1]: tiny.build(weights)}
        assert tiny.worst_error(judge, request("").tokens.tolist(), done) < 1e-4


async def test_a_version_is_pulled_by_a_host_that_does_not_see_the_folder(served, versions, tmp_path):
    first, second = versions.number(), versions.number()
    weights = {number: tiny.random_weights(number) for number in (first, second)}
    manifests = {number: _publish(tmp_path, number, weights[number]) for number in (first, second)}
    async with client_of(served) as client, listen(ShardServer(tmp_path, TOKEN).app(), "127.0.0.1", 0) as url:
        sources = ["http://127.0.0.1:9", url]
        for number, manifest in manifests.items():
            message = _message(manifest, "/nowhere", sources=sources)
            assert await client.post("/weights/prefetch", message) == (200, {})
            assert await client.post("/weights/update", message) == (200, {"version": number})
            async with client.stream(f"pulled{number}", 40) as events:
                got = [event async for event in events]
            assert tiny.worst_error({number: tiny.build(weights[number])}, [9, 10, 11], completion_of(got)) < 1e-4
        data = bytearray((tmp_path / manifests[second].folder / "a.safetensors").read_bytes())
        third = versions.number()
        corrupt = _publish(tmp_path, third, weights[first])
        (tmp_path / corrupt.folder / "a.safetensors").write_bytes(data)
        status, said = await client.post("/weights/update", _message(corrupt, "/nowhere", sources=sources))
        assert (status, said["error"]["kind"]) == (422, "weights")
    async with client_of(served) as client:
        status, said = await client.post("/weights/update", _message(corrupt, "/nowhere", sources=sources))
        assert status == 422
        assert (await client.figures())["version"] == second
