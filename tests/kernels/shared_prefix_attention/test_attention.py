"""The operation as its callers see it: choice of the twin, sums in place, odd inputs, refusals."""

import pytest
import torch

from kernels import dispatch
from kernels.shared_prefix_attention import OP, TWINS, Prefix, Saved, attention
from tests.kernels.shared_prefix_attention.cases import Case, run, tensors

PLAIN = Case()
ON_CPU = ["cpu", "blocks", "reference"]


def inputs_and_prefix(case=PLAIN, dtype=torch.float64):
    """Query, key, value that want gradients, and a prefix with empty sums."""
    made = tensors(case, dtype)
    query, key, value = (made[name].requires_grad_() for name in ("query", "key", "value"))
    sums = (torch.zeros_like(made[name]) for name in ("prefix_key", "prefix_value"))
    return query, key, value, Prefix(made["prefix_key"], made["prefix_value"], *sums)


def test_on_the_cpu_the_cpu_twin_runs_and_says_why():
    query, key, value, prefix = inputs_and_prefix()
    before = dispatch.counters[OP]["cpu"]
    attention(query, key, value, prefix, scale=1.0)
    assert dispatch.counters[OP]["cpu"] == before + 1
    assert dispatch.reasons[OP]["cpu"] == "not triton: tensors are on cpu"


@pytest.mark.parametrize("twin", ["blocks", "reference"])
def test_a_twin_can_be_forced(twin):
    query, key, value, prefix = inputs_and_prefix()
    before = dispatch.counters[OP][twin]
    with dispatch.override(OP, twin):
        attention(query, key, value, prefix, scale=1.0)
    assert dispatch.counters[OP][twin] == before + 1


def test_triton_on_the_cpu_outside_the_interpreter_raises(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    query, key, value, prefix = inputs_and_prefix()
    with (
        dispatch.override(OP, "triton"),
        pytest.raises(dispatch.CannotRun, match="not triton: tensors are on cpu"),
    ):
        attention(query, key, value, prefix, scale=1.0)


def test_the_twins_are_listed_by_preference():
    assert [twin.name for twin in TWINS] == ["triton", "cpu", "blocks", "reference"]


@pytest.mark.parametrize("twin", ON_CPU)
def test_every_backward_adds_to_the_prefix_gradients(twin):
    case = Case()
    once = run(case, twin, tensors(case, torch.float64))
    query, key, value, prefix = inputs_and_prefix(case)
    grad_out = tensors(case, torch.float64)["grad_out"]
    prefix.key_grad += 1.0
    with dispatch.override(OP, twin):
        out = attention(query, key, value, prefix, scale=case.head_dim**-0.5)
    out.backward(grad_out, retain_graph=True)
    out.backward(grad_out)
    torch.testing.assert_close(prefix.key_grad, 1 + 2 * once["prefix_key"])
    torch.testing.assert_close(prefix.value_grad, 2 * once["prefix_value"])


@pytest.mark.parametrize("twin", ON_CPU)
def test_without_sums_the_prefix_gets_no_gradient(twin):
    query, key, value, prefix = inputs_and_prefix()
    prefix.key_grad = prefix.value_grad = None
    with dispatch.override(OP, twin):
        attention(query, key, value, prefix, scale=1.0).sum().backward()
    assert query.grad is not None
    assert prefix.key_grad is None and prefix.value_grad is None
    assert prefix.key.grad is None and prefix.value.grad is None


@pytest.mark.parametrize("twin", ON_CPU)
def test_the_prefix_gradient_is_found_by_whatever_way_gradients_are_asked_for(twin):
    """`torch.autograd.grad` runs what leads to its inputs only."""
    case = Case(sinks=True)
    inputs = tensors(case, torch.float64)
    truth = run(case, "reference", inputs)
    for name in ("query", "key", "value", "sinks"):
        leaves = {k: inputs[k].clone().requires_grad_() for k in ("query", "key", "value", "sinks")}
        sums = [torch.zeros_like(inputs[k]) for k in ("prefix_key", "prefix_value")]
        prefix = Prefix(inputs["prefix_key"], inputs["prefix_value"], *sums)
        with dispatch.override(OP, twin):
            out = attention(**leaves, prefix=prefix, scale=case.head_dim**-0.5)
        (found,) = torch.autograd.grad([out], [leaves[name]], [inputs["grad_out"]])
        torch.testing.assert_close(found, truth[name])
        torch.testing.assert_close(prefix.key_grad, truth["prefix_key"])
        torch.testing.assert_close(prefix.value_grad, truth["prefix_value"])


@pytest.mark.parametrize("case", [Case(), Case(sinks=True, window=9, head_dim=24)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("twin", ["cpu", "blocks"])
def test_what_was_saved_spares_the_forward_and_changes_no_bit(twin, dtype, case):
    inputs = tensors(case, dtype)
    plain = run(case, twin, inputs)
    saved = Saved()
    options = {"saved": saved, "scale": case.head_dim**-0.5, "window": case.window}
    for attempt in range(3):
        leaves = {k: inputs[k].clone().requires_grad_() for k in plain if k in inputs}
        shared = [leaves.pop(name).detach() for name in ("prefix_key", "prefix_value")]
        wide = torch.promote_types(dtype, torch.float32)
        prefix = Prefix(*shared, *(torch.zeros_like(x, dtype=wide) for x in shared))
        with dispatch.override(OP, twin), torch.set_grad_enabled(attempt > 0):
            out = attention(**leaves, prefix=prefix, **options)
        assert torch.equal(out, plain["out"])
        if attempt > 0:
            out.backward(inputs["grad_out"])
            assert all(torch.equal(leaf.grad, plain[name]) for name, leaf in leaves.items())
            assert torch.equal(prefix.key_grad, plain["prefix_key"])
            assert torch.equal(prefix.value_grad, plain["prefix_value"])
    assert saved.lse.shape == saved.out.shape[:3]
    saved.out.zero_()  # nobody computes it again
    with dispatch.override(OP, twin):
        assert not attention(**leaves, prefix=prefix, **options).any()


def test_the_reference_computes_every_time():
    query, key, value, prefix = inputs_and_prefix()
    saved = Saved()
    with dispatch.override(OP, "reference"):
        attention(query, key, value, prefix, scale=1.0, saved=saved)
    assert saved == Saved()


@pytest.mark.parametrize("twin", ON_CPU)
def test_views_into_larger_buffers_and_transposed_inputs(twin):
    """What the engine passes: a chunk's part of the buffers, and heads behind tokens in memory."""
    case = Case(batch=2, group=3)
    inputs = tensors(case, torch.float64)
    plain = run(case, twin, inputs)
    buffers = [torch.full((2, 50, 16), 7.0, dtype=torch.float64) for _ in range(4)]
    views = [buffer[:, 4:37] for buffer in buffers]
    views[0].copy_(inputs["prefix_key"])
    views[1].copy_(inputs["prefix_value"])
    leaves = [
        inputs[name].transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
        for name in ("query", "key", "value")
    ]
    grad_out = inputs["grad_out"].mT.contiguous().mT
    with dispatch.override(OP, twin):
        out = attention(*leaves, Prefix(*views), scale=0.25)
    out.backward(grad_out)
    torch.testing.assert_close(out.detach(), plain["out"])
    for name, leaf in zip(("query", "key", "value"), leaves, strict=True):
        torch.testing.assert_close(leaf.grad, plain[name])
    torch.testing.assert_close(views[2] - 7, plain["prefix_key"])
    torch.testing.assert_close(views[3] - 7, plain["prefix_value"])
    for buffer in buffers:
        assert (buffer[:, :4] == 7).all() and (buffer[:, 37:] == 7).all()


@pytest.mark.parametrize("twin", ON_CPU)
def test_a_prefix_whose_last_dimension_is_strided(twin):
    case = Case()
    inputs = tensors(case, torch.float64)
    plain = run(case, twin, inputs)
    strided = {name: x.mT.contiguous().mT for name, x in inputs.items()}
    assert strided["prefix_key"].stride(2) != 1
    for name, x in run(case, twin, strided).items():
        torch.testing.assert_close(x, plain[name])


@pytest.mark.parametrize("twin", ON_CPU)
def test_identical_rows_of_the_batch_are_one_row_many_times(twin):
    """Three copies of a branch give three times the prefix gradient of one."""
    single = {name: x[:1] if name in ("query", "key", "value", "grad_out") else x
              for name, x in tensors(Case(), torch.float64).items()}  # fmt: skip
    triple = {name: x.expand(3, -1, -1, -1) if x.ndim == 4 else x for name, x in single.items()}
    one, three = run(Case(batch=1), twin, single), run(Case(batch=3), twin, triple)
    torch.testing.assert_close(three["out"], one["out"].expand(3, -1, -1, -1))
    torch.testing.assert_close(three["query"], one["query"].expand(3, -1, -1, -1))
    torch.testing.assert_close(three["prefix_key"], 3 * one["prefix_key"])
    torch.testing.assert_close(three["prefix_value"], 3 * one["prefix_value"])


def test_no_prefix_is_an_empty_prefix():
    query, key, value, prefix = inputs_and_prefix(Case(prefix=0))
    given = attention(query, key, value, prefix, scale=1.0)
    torch.testing.assert_close(attention(query, key, value, scale=1.0), given)


@pytest.mark.parametrize("case", [Case(tokens=0), Case(batch=0)], ids=str)
@pytest.mark.parametrize("twin", ON_CPU)
def test_no_tokens_or_no_rows_give_an_empty_output(case, twin):
    query, key, value, prefix = inputs_and_prefix(case)
    with dispatch.override(OP, twin):
        out = attention(query, key, value, prefix, scale=1.0)
    assert out.shape == query.shape
    out.sum().backward()
    assert query.grad.shape == query.shape
    assert not prefix.key_grad.any()


def test_without_autograd_nothing_is_kept():
    query, key, value, prefix = inputs_and_prefix()
    with torch.no_grad():
        out = attention(query, key, value, prefix, scale=1.0)
    assert not out.requires_grad


def test_output_is_laid_out_as_the_next_projection_reads_it():
    query, key, value, prefix = inputs_and_prefix()
    assert attention(query, key, value, prefix, scale=1.0).transpose(1, 2).is_contiguous()


REFUSED = {
    "key has shape": lambda a: a.update(key=a["key"][:, :, 1:]),
    "value has shape": lambda a: a.update(value=a["value"][:1]),
    "do not divide": lambda a: a.update(query=a["query"][:, 1:]),
    "prefix.key has shape": lambda a: setattr(a["prefix"], "key", a["prefix"].key[:1]),
    "prefix.value has shape": lambda a: setattr(a["prefix"], "value", a["prefix"].value[:, 1:]),
    "prefix.key_grad has shape": lambda a: setattr(a["prefix"], "key_grad", torch.zeros(1, 1, 1)),
    "prefix.value_grad must be": lambda a: setattr(
        a["prefix"], "value_grad", a["prefix"].value_grad.float()
    ),
    "give both or neither": lambda a: setattr(a["prefix"], "key_grad", None),
    "must be detached": lambda a: a["prefix"].key.requires_grad_(),
    "one dtype and device": lambda a: a.update(query=a["query"].float()),
    "window must be at least 1": lambda a: a.update(window=0),
    "softcap must be positive": lambda a: a.update(softcap=0.0),
    "sinks has shape": lambda a: a.update(sinks=torch.zeros(3)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_arguments_that_do_not_fit_are_refused_in_one_line(message):
    query, key, value, prefix = inputs_and_prefix()
    arguments = {"query": query, "key": key, "value": value, "prefix": prefix, "scale": 1.0}
    REFUSED[message](arguments)
    with pytest.raises(ValueError, match=message) as caught:
        attention(**arguments)
    assert "\n" not in str(caught.value)
