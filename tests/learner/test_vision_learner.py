"""A model that sees images, in training: against plain transformers and plain autograd, for three families."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_policy import LAYOUTS, lay_out, passes_of
from vision_samples import IMAGES, Samples, plain_model, vision_config, wired
from weights_kit import export, full_tensors

from streamrl import wire
from streamrl.config import ImagesConfig, ModelConfig
from streamrl.errors import ConfigError, Refused
from streamrl.images.store import ImageStore
from streamrl.images.vision import vision_of
from streamrl.learner import rows
from streamrl.learner.algorithms.recipe import Recipe
from streamrl.learner.batch import RowLimits, pack
from streamrl.learner.critic import Critic
from streamrl.learner.groups import GroupOpener, Unusable
from streamrl.learner.policy import Actor
from streamrl.learner.rank_group import decode, encode
from streamrl.learner.reference import FrozenReference, make_reference
from streamrl.learner.sharding import check_fit
from streamrl.learner.weight_copy import Copies
from streamrl.queues.records import ClosedGroup
from streamrl.store import Folder
from tests.vision_kit import KINDS, make_vision_model

TOWERS = {"qwen2_vl": ("model.visual.",), "qwen3_vl": ("model.visual.",)}
TOWERS["smolvlm"] = ("model.vision_model.", "model.connector.")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """Folder and samples of a kind, made once."""
    made = {}

    def get(kind):
        if kind not in made:
            folder = make_vision_model(tmp_path_factory.mktemp("seeing") / kind, kind)
            made[kind] = folder, Samples(folder)
        return made[kind]

    return get


@pytest.fixture(scope="module")
def actor_of(seeing, one_rank):
    """An actor that no test trains, made once for each kind."""
    made = {}

    def get(kind):
        if kind not in made:
            made[kind] = Actor(vision_config(seeing(kind)[0]), one_rank)
        return made[kind]

    return get


def copies(actor):
    return {name: tensor.clone() for name, tensor in Copies(actor.published, torch.float32).take().tensors}


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_equal_a_plain_pass_in_every_layout(actor_of, seeing, kind):
    """Shared prompts, dense and packed rows, episodes whose tools show images, rows of text beside them."""
    folder, samples = seeing(kind)
    actor, model, batch = actor_of(kind), plain_model(folder), samples.batch()
    before = actor.limits
    assert before.shared, "the check at the start, with an image in a row, found no difference"
    actor.check_samples(batch)
    with torch.no_grad():
        expected = [samples.plain(model, sample).numpy() for sample in batch]
    for layout in LAYOUTS:
        lay_out(actor, layout)
        chosen = [one for one in batch if one.tree is None] if layout == "alone" else batch
        found = actor.compute_log_prob(chosen, calculate_entropy=True)
        for ours, theirs in zip(found.logprobs, expected, strict=False):
            assert ours == pytest.approx(theirs, abs=2e-5), layout
        assert all(np.isfinite(spread).all() for spread in found.entropy)
        actor.limits = before


@pytest.mark.parametrize("kind", KINDS)
def test_one_step_equals_plain_autograd(seeing, one_rank, kind):
    folder, samples = seeing(kind)
    model, batch = plain_model(folder), samples.batch()
    for sample in batch:
        logprobs = samples.plain(model, sample)
        weight = (logprobs.detach() - torch.from_numpy(sample.logprobs)).exp().clamp(max=2.0)
        (-(weight * torch.from_numpy(sample.advantages) * (logprobs - logprobs.detach()).exp()).sum()).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for train_vision in (False, True):
        actor = Actor(vision_config(folder, train_vision=train_vision, tokens_per_microbatch=64), one_rank)
        passes = passes_of(actor)
        actor.accumulate(batch)
        assert len(passes) > 2
        assert any(part.images for part in passes)
        tower = {name for name in actor.parameters if name.startswith(TOWERS[kind])}
        assert bool(tower) == train_vision
        for name, parameter in actor.parameters.items():
            ours = torch.zeros(parameter.shape) if parameter.grad is None else parameter.grad.full_tensor()
            torch.testing.assert_close(ours, expected[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_tower_is_published_as_it_was_and_a_trained_one_changes(seeing, one_rank, kind):
    folder, samples = seeing(kind)
    names = dict(plain_model(folder).named_parameters())
    for train_vision in (False, True):
        actor = Actor(vision_config(folder, train_vision=train_vision), one_rank)
        before = copies(actor)
        assert before.keys() == names.keys()
        actor.update_policy(samples.batch())
        changed = {name for name, tensor in copies(actor).items() if not torch.equal(tensor, before[name])}
        assert any(name.startswith(TOWERS[kind]) for name in changed) == train_vision
        assert any(".layers." in name for name in changed)


@pytest.mark.parametrize("kind", KINDS)
def test_the_check_at_the_start_has_an_image(actor_of, seeing, kind, caplog):
    limits = actor_of(kind).limits
    whole, half, *group, other = rows._samples(limits, 512, 256)
    assert not any(one.images for one in (whole, half, other))
    assert len(group) > 2
    for one in group:
        (image,) = one.blobs
        assert one.images == (image,)
        assert limits.vision.spans(one.prompt.tolist(), [(1, 1)])[0][0] == 0
    assert len(group[0].prompt) + sum(len(one.tokens) - 1 for one in group) <= limits.shared
    assert not caplog.records
    rows._samples(replace(limits, shared=16), 16, 256)
    assert [record.message for record in caplog.records] in ([], ["rows are checked without an image"])


def test_entropy_and_probabilities_leave_placeholders_out(actor_of, seeing):
    """An engine cannot sample them, so the other tokens share all of the probability."""
    folder, samples = seeing("qwen2_vl")
    actor, (sample, *_) = actor_of("qwen2_vl"), samples.batch()
    found = actor.compute_log_prob([replace(sample, tree=None)], calculate_entropy=True)
    model = plain_model(folder)
    ids = torch.from_numpy(np.concatenate([sample.prompt, sample.tokens])).long()[None]
    pixels = samples.vision.joined([samples.vision.pixels(name, sample.blobs[name]) for name in sample.images])
    options = {name: torch.from_numpy(array) for name, array in pixels.items()}
    with torch.no_grad():
        kinds = (ids == samples.vision.token_id).int()
        logits = model(input_ids=ids, mm_token_type_ids=kinds, **options).logits[0, len(sample.prompt) - 1 : -1]
    allowed = [token for token in range(logits.shape[-1]) if token not in samples.vision.forbidden]
    logprobs = torch.log_softmax(logits[:, allowed], dim=-1)
    assert found.entropy[0] == pytest.approx(-(logprobs.exp() * logprobs).sum(-1).numpy(), abs=1e-5)


def test_an_image_in_another_place_or_another_one_is_another_prompt(actor_of, seeing):
    """Equal ids with other images are not one shared prompt, and do not have the same log-probabilities."""
    _, samples = seeing("qwen2_vl")
    actor = actor_of("qwen2_vl")
    one = samples.sample(0, "q", [2], 5)
    other = replace(one, images=(IMAGES[0].sha256,), blobs={IMAGES[0].sha256: IMAGES[2].data})
    parts = pack([one, other], RowLimits(tokens=512, shared=256, hidden=32, vision=samples.vision))
    assert not any(part.shared for part in parts)
    first, second = actor.compute_log_prob([one, samples.sample(1, "q", [2], 5)]).logprobs
    assert not np.allclose(first, second)


def test_padding_behind_a_prompt_that_ends_with_an_image(actor_of, seeing):
    _, samples = seeing("qwen2_vl")
    actor = actor_of("qwen2_vl")
    whole = samples.sample(0, "q", [2], 1)
    (begin, count), *_ = samples.vision.spans(whole.prompt.tolist(), [IMAGES[2].size])
    assert whole.prompt[begin + count - 1] == samples.vision.token_id
    cut = replace(whole, prompt=whole.prompt[: begin + count])
    alone = actor.compute_log_prob([cut]).logprobs[0]
    beside = actor.compute_log_prob([cut, samples.sample(1, "longer than the other one", [], 9)]).logprobs[0]
    assert beside == pytest.approx(alone, abs=1e-5)


def test_pixels_are_made_once_for_all_passes_and_models(seeing, one_rank):
    folder, samples = seeing("qwen2_vl")
    config = vision_config(folder, reference={"kind": "frozen"}, tokens_per_microbatch=64)
    actor, reference = Actor(config, one_rank), FrozenReference(config, one_rank)
    check_fit("learner.reference.path", str(folder), reference, actor, config.model)
    before, batch = actor.vision.processed, samples.batch()
    ours = actor.compute_log_prob(batch).logprobs
    theirs = reference.compute_ref_log_prob(batch)
    actor.accumulate(batch)
    assert actor.vision.processed - before == len(IMAGES)
    for one, other in zip(ours, theirs, strict=True):
        assert other == pytest.approx(one, abs=1e-6)


def test_samples_travel_between_ranks_with_one_copy_of_an_image(seeing):
    _, samples = seeing("qwen2_vl")
    batch = samples.batch()
    data = encode(batch)
    assert all(data.count(image.data) == 1 for image in IMAGES)
    for ours, theirs in zip(decode(data), batch, strict=True):
        assert (ours.images, ours.blobs) == (theirs.images, theirs.blobs)
        assert np.array_equal(ours.prompt, theirs.prompt)
    assert decode(encode([samples.sample(1, "text", [], 3)]))[0].blobs == {}


# ---- other models of a step


def test_a_reference_of_servers_or_with_other_pixels_is_refused(seeing, actor_of, one_rank, tmp_path):
    folder, _ = seeing("qwen2_vl")
    actor = actor_of("qwen2_vl")
    remote = vision_config(folder, reference={"kind": "remote", "url": ["http://127.0.0.1:1"]})
    with pytest.raises(ConfigError, match="sends servers token ids alone"):
        make_reference(remote, one_rank, actor)
    other = make_vision_model(tmp_path / "other", "qwen2_vl")
    config = (other / "preprocessor_config.json").read_text()
    (other / "preprocessor_config.json").write_text(config.replace("12544", "6272"))
    frozen = vision_config(folder, reference={"kind": "frozen", "path": str(other)})
    with pytest.raises(ConfigError, match="makes other pixels of an image than the policy"):
        make_reference(frozen, one_rank, actor)


@pytest.mark.parametrize("kind", KINDS)
def test_a_critic_sees_images_and_keeps_its_tower(seeing, one_rank, kind):
    folder, samples = seeing(kind)
    critic = Critic(vision_config(folder, critic={"kind": "model", "lr": 1e-2}, advantage={"use": "gae"}), one_rank)
    batch = samples.batch()
    random = np.random.default_rng(0)
    values = critic.compute_values(batch)
    ready = [
        replace(one, values=value, returns=random.normal(size=len(value)).astype(np.float32))
        for one, value in zip(batch, values, strict=True)
    ]
    assert not any(name.startswith(("visual.", "vision_model.", "connector.")) for name in critic.parameters)
    assert critic.update_critic(ready).grad_norm > 0
    after = critic.compute_values(batch)
    assert not np.allclose(np.concatenate(after), np.concatenate(values))


@pytest.mark.parametrize("train_vision", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_and_its_merge(seeing, one_rank, kind, train_vision, tmp_path):
    folder, samples = seeing(kind)
    config = vision_config(folder, lora={"rank": 4, "alpha": 8.0}, train_vision=train_vision)
    actor, batch = Actor(config, one_rank), samples.batch()
    assert any("_proj" in name for name in actor.parameters)
    adapted = [name for name in actor.parameters if any(tower.rstrip(".") in name for tower in TOWERS[kind])]
    assert bool(adapted) == train_vision
    before = actor.compute_log_prob(batch).logprobs
    actor.update_policy(batch)
    after = actor.compute_log_prob(batch).logprobs
    assert not np.allclose(np.concatenate(before), np.concatenate(after))
    for ours, theirs in zip(actor.compute_ref_log_prob(batch), before, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)
    export(actor, tmp_path / "merged")
    model = plain_model(tmp_path / "merged")
    with torch.no_grad():
        for sample, ours in zip(batch, after, strict=True):
            assert ours == pytest.approx(samples.plain(model, sample).numpy(), abs=5e-5)


@pytest.mark.parametrize("train_vision", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_model_loads_with_its_processor_and_template(seeing, one_rank, kind, train_vision, tmp_path):
    folder, samples = seeing(kind)
    actor = Actor(vision_config(folder, train_vision=train_vision), one_rank)
    actor.update_policy(samples.batch())
    export(actor, tmp_path / "out")
    found = dict(plain_model(tmp_path / "out").named_parameters())
    expected = copies(actor)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    there = Samples(tmp_path / "out")
    assert there.vision.fingerprint == samples.vision.fingerprint
    assert there.ids("q", [0, 1]).tolist() == samples.ids("q", [0, 1]).tolist()


def test_a_checkpoint_goes_on_with_the_tower_of_the_model(seeing, one_rank):
    folder, samples = seeing("qwen2_vl")
    first, second = (Actor(vision_config(folder), one_rank) for _ in range(2))
    first.update_policy(samples.batch())
    second.load_shard_state(first.shard_state())
    assert full_tensors(second).keys() == full_tensors(first).keys()
    ours, theirs = copies(second), copies(first)
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


# ---- groups


def closed(samples, one, *, processor=None, **values):
    """A group of one response to the prompt of a sample, as it is in Redis."""
    shown = [image for image in IMAGES if image.sha256 in one.images]
    prompt = {
        "v": wire.SCHEMA,
        "tokens": wire.pack_int32(one.prompt),
        "images": list(one.images),
        "blobs": [image.data for image in shown],
        "processor": samples.vision.fingerprint if processor is None else processor,
    }
    score = wire.encode(wire.SampleScore(value=1.0))
    return ClosedGroup(
        group_id=9,
        size=1,
        attempt=0,
        version=3,
        crashes=0,
        causes={},
        prompt=wire.encode(wire.Prompt(**{**prompt, **values})),
        samples={0: (wire.encode(wired(one)), score)},
    )


@pytest.fixture
def opener(actor_of, seeing, tmp_path):
    _, samples = seeing("qwen2_vl")
    actor, store = actor_of("qwen2_vl"), ImageStore(ImagesConfig(), Folder(tmp_path))
    recipe = Recipe.of(vision_config(seeing("qwen2_vl")[0]))
    return GroupOpener(recipe, actor.check_samples, store, samples.vision.fingerprint)


def test_a_group_is_opened_with_small_and_large_images(opener, seeing, tmp_path):
    _, samples = seeing("qwen2_vl")
    one = samples.sample(9, "q", [0, 1], 4)
    (sample,) = opener(closed(samples, one), {3: 1}.__getitem__).samples
    assert (sample.images, sample.blobs) == (one.images, one.blobs)
    large = ImageStore(ImagesConfig(inline=0), Folder(tmp_path))
    assert large.keep(one.blobs) == []
    (again,) = opener(closed(samples, one, blobs=[]), {3: 1}.__getitem__).samples
    assert again.blobs == one.blobs


def test_images_of_turns_are_read_and_checked(opener, seeing):
    _, samples = seeing("qwen2_vl")
    one = samples.sample(9, "q", [0], 5)
    shown = samples.ids("t", [1])

    def group(media, blobs):
        turns = [
            wire.Turn(sampled=3),
            wire.Turn(parent=0, role="tool", observed=wire.pack_int32(shown), media=media),
            wire.Turn(parent=1, sampled=2),
        ]
        sample = wired(one, v=wire.SCHEMA, turns=turns, blobs=blobs)
        whole = closed(samples, one)
        return replace(whole, samples={0: (wire.encode(sample), whole.samples[0][1])})

    (sample,) = opener(group([IMAGES[1].sha256], [IMAGES[1].data]), {3: 1}.__getitem__).samples
    assert sample.tree.media == ((), (IMAGES[1].sha256,), ())
    assert sample.blobs == {image.sha256: image.data for image in IMAGES[:2]}
    with pytest.raises(Unusable, match="tokens of more images than it has"):
        opener(group([], []), {3: 1}.__getitem__)


def test_groups_whose_images_do_not_fit_are_unusable(opener, seeing, one_rank):
    folder, samples = seeing("qwen2_vl")
    one = samples.sample(9, "q", [0, 1], 4)
    step = {3: 1}.__getitem__
    for group, why in (
        (closed(samples, one, blobs=[]), "the image .* is not in"),
        (closed(samples, one, images=[one.images[0]]), "tokens of more images than it has"),
        (closed(samples, replace(one, prompt=samples.ids("q", [0]))), "does not have its tokens in the prompt"),
        (closed(samples, replace(one, tokens=np.full(4, samples.vision.token_id, np.int32))), "was sampled"),
    ):
        with pytest.raises(Unusable, match=rf"group 9 cannot be trained: .*{why}"):
            opener(group, step)
    with pytest.raises(Refused, match="counted by the image processor other"):
        opener(closed(samples, one, processor="other"), step)
    blind = GroupOpener(Recipe.of(vision_config(folder)), lambda _: None)
    with pytest.raises(Unusable, match="the model takes text alone"):
        blind(closed(samples, one), step)
    assert hashlib.sha256(IMAGES[0].data).hexdigest() == IMAGES[0].sha256


def test_a_processor_with_other_settings_counts_other_tokens(seeing):
    """What the fingerprint is for: the same image, another number of tokens."""
    folder, samples = seeing("qwen2_vl")
    large = {"size": {"shortest_edge": 4096, "longest_edge": 8192}}
    other = vision_of(ModelConfig(path=str(folder), image_processor=large), samples.tokenizer)
    assert other.fingerprint != samples.vision.fingerprint
    assert len(other.tokens_of(IMAGES[0].size)) != len(samples.vision.tokens_of(IMAGES[0].size))
