"""A real worker with a tiny model that sees: what becomes of prompts whose images are lost while the run goes on."""

import hashlib

import orjson
import replica_kit
import torch
from producer_kit import until
from replica_kit import Learner, replica_on, samples_of
from transformers import AutoModelForImageTextToText

from streamrl.images.store import ImageStore
from streamrl.producers import images
from streamrl.producers.admission import AdmissionTerms, Admitter
from streamrl.producers.dataset import PromptLimits, load_prompts
from streamrl.producers.tokenizer import Tokenizer
from streamrl.wire import Sample, decode
from tests.vision_kit import make_vision_model, picture


async def settled(ledger):
    return await ledger.connection.read("XLEN", ledger.keys.prompts) == 0


async def test_a_lost_or_changed_image_is_a_dead_letter_and_the_others_are_answered(run, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    """The first image is deleted, the second has other bytes; the third cannot be read for a while."""
    monkeypatch.setattr(images, "_PAUSE", 0.01)
    folder = make_vision_model(tmp_path / "model", "qwen2_vl")
    pictures = [picture(seed, 64, 64) for seed in range(3)]
    names = [hashlib.sha256(data).hexdigest() for data in pictures]
    for at, data in enumerate(pictures):
        (tmp_path / f"{at}.png").write_bytes(data)
    asked = [{"role": "user", "content": [{"type": "image"}]}]
    lines = [orjson.dumps({"messages": asked, "images": [f"{at}.png"]}) for at in range(3)]
    run.train.write_bytes(b"\n".join(lines))
    run.set("model", path=str(folder), context=64).set("data", max_prompt_tokens=40).set("images", inline=0)
    run.set("engine", threads=1, slots=4)
    tokenizer, store = Tokenizer.load(run.config.model), ImageStore.of(run.config, run.run_dir)
    data = load_prompts(run.config.data.train, tokenizer, PromptLimits.of(run.config), store=store)
    (run.run_dir / "images" / names[0]).unlink()
    (run.run_dir / "images" / names[1]).write_bytes(pictures[2])
    away = (run.run_dir / "images" / names[2]).rename(tmp_path / "away")
    (run.run_dir / "images" / names[2]).mkdir()
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    monkeypatch.setattr(replica_kit, "tiny_model", lambda seed: model)
    async with run.open() as ledgers:
        await Learner.of(run, ledgers)
        terms = AdmissionTerms("f", 2, 1, 10, 10, 10)
        await Admitter(ledgers.train, terms, lambda group_id: data.prompts[group_id]).admit(1, limit=3)
        async with replica_on(run, ledgers) as (_, _, task):
            await until(lambda: "given back" in caplog.text)
            (run.run_dir / "images" / names[2]).rmdir()
            away.rename(run.run_dir / "images" / names[2])
            await until(lambda: settled(ledgers.train))
            assert not task.done(), "the worker goes on"
        answered = [await samples_of(ledgers.train, group) for group in range(3)]
        letters = [letter for letter in await ledgers.train.dead_letters() if letter.sample is not None]
    assert [len(samples) for samples in answered] == [0, 0, 2]
    assert all(decode(payload, Sample).token_ids.size for payload in answered[2].values())
    whys = {group: {letter.why for letter in letters if letter.group_id == group} for group in (0, 1)}
    assert [len(why) for why in whys.values()] == [1, 1], "the same for both samples, at the first attempt"
    assert f"the image {names[0][:12]} is not in" in whys[0].pop()
    assert "has other bytes than when it was kept" in whys[1].pop()
