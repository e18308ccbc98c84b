"""Stages: together they are the model, bit for bit; joined again, an ordinary directory."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from algorithms.async_pipeline.stage import cut, gather, join
from algorithms.common.errors import InputError
from algorithms.common.model import logits
from tests.families import tiny
from tests.pipelines import FAMILIES, VOCAB, model_of

TOKENS = torch.randint(VOCAB, (2, 19), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("counts", [[4], [1, 3], [1, 1, 1, 1], [0, 2, 2, 0]], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_one_after_the_other_are_the_model(family, counts):
    model = model_of(family)
    found = TOKENS
    stages = cut(model, counts)
    for stage in stages:
        found = stage(found)
    assert torch.equal(found, logits(model, TOKENS))
    named = [list(stage.named_parameters()) for stage in stages]
    assert {n: id(p) for each in named for n, p in each} == {
        n: id(p) for n, p in model.named_parameters()
    }
    assert sum(map(len, named)) == len(list(model.named_parameters()))


def test_eager_attention_is_cut_as_well():
    model = model_of("mistral")
    model.set_attn_implementation("eager")
    first, second = cut(model, [1, 3])
    assert torch.equal(second(first(TOKENS)), logits(model, TOKENS))


def test_the_model_is_left_as_it_was():
    model = model_of("qwen2")
    before = logits(model, TOKENS)
    cut(model, [1, 3])
    assert len(model.model.layers) == model.config.num_hidden_layers == 4
    assert torch.equal(logits(model, TOKENS), before)


def test_joined_stages_are_an_ordinary_directory(tmp_path):
    model, other = model_of("qwen3"), model_of("qwen3")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    parts = [stage.state_dict() for stage in cut(model, [1, 2, 1])]
    join(other, parts).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded, TOKENS), logits(model, TOKENS))


def test_one_stage_may_tie_its_embedding_and_join_it(tmp_path):
    model, other = (model_of("llama", tied=True) for _ in range(2))
    (stage,) = cut(model, [4])
    join(other, [dict(stage.named_parameters())])
    assert torch.equal(logits(other, TOKENS), logits(model, TOKENS))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parts: parts[:1], "is on no stage"),
        (lambda parts: [*parts, parts[0]], "is on two stages"),
        (lambda parts: [*parts, {"other": torch.ones(1)}], "other: is not in the model"),
        (lambda parts: [{k: v[:1] for k, v in p.items()} for p in parts], "do not fit the model"),
    ],
)
def test_parts_that_are_not_the_model(change, message):
    model = model_of("llama")
    parts = [stage.state_dict() for stage in cut(model, [1, 3])]
    with pytest.raises(InputError, match=message):
        join(model_of("llama"), change(parts))


def test_a_tied_head_is_refused_in_one_line_that_says_how_to_untie():
    model = model_of("llama", tied=True)
    with pytest.raises(
        InputError, match="^model.tie_word_embeddings: .* set it to false"
    ) as caught:
        cut(model, [1, 3])
    assert "\n" not in str(caught.value)


def test_dropout_is_refused():
    with pytest.raises(InputError, match=r"^model.extra.attention_dropout: must be 0"):
        cut(model_of("llama", attention_dropout=0.1), [1, 3])


def test_a_family_without_these_parts_is_refused():
    with pytest.raises(InputError, match="^model.family: .* without embed_tokens"):
        cut(tiny("gpt2", torch.float32), [1, 2])


def test_a_family_that_does_more_between_its_parts_is_refused():
    model = tiny("gemma2", torch.float32, tie_word_embeddings=False)  # caps its logits
    with pytest.raises(InputError, match="^model.family: gemma2 cannot be cut"):
        cut(model, [1, 2])


def gathered(comm):
    stage = cut(model_of("llama"), [1, 2, 1])[comm.rank]
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.add_(comm.rank)
    parts = gather(stage, comm)
    return parts, comm.counters["weights"].payload_bytes if comm.rank else 0


def test_rank_0_gets_the_weights_of_every_stage(ranks):
    (parts, _), *others = ranks.run(gathered, world_size=3)
    for rank, stage in enumerate(cut(model_of("llama"), [1, 2, 1])):
        for name, parameter in stage.named_parameters():
            assert torch.equal(parts[rank][name], parameter + rank)
    for rank, (nothing, sent) in enumerate(others, 1):
        assert nothing is None
        assert sent == sum(w.nbytes for w in parts[rank].values())
