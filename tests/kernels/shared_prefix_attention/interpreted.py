"""The Triton twin in Triton's interpreter, in a process of its own.

The interpreter is chosen when the kernels are imported, for the whole process, so the tests run
`TRITON_INTERPRET=1 python -m tests.kernels.shared_prefix_attention.interpreted` and read the JSON
that it prints: the error of every result of every case.
"""

import json
import warnings

import torch

from kernels import dispatch
from kernels.shared_prefix_attention import OP, Saved
from tests.kernels.shared_prefix_attention.cases import Case, errors, relative, run, tensors

PLAIN = [
    Case(prefix=0),
    Case(prefix=0, tokens=1, batch=1, group=1),
    Case(prefix=1, tokens=1, group=3),
    Case(prefix=5, tokens=2, batch=3),
    Case(prefix=130, tokens=65, batch=1, kv_heads=1),
    Case(prefix=64, tokens=33, kv_heads=1, group=4, head_dim=32, value_dim=32),
    Case(group=3, head_dim=24, value_dim=40),
    Case(head_dim=65, value_dim=8, kv_heads=1),
    Case(head_dim=8, value_dim=8, sinks=True),
]
SPECIAL = [
    Case(window=1),
    Case(window=10, prefix=130, tokens=65, kv_heads=1),
    Case(window=36, group=3, sinks=True),
    Case(window=70, prefix=130, tokens=20, kv_heads=1, softcap=2.0),
    Case(window=1000),
    Case(softcap=0.8, sinks=True),
    Case(prefix=0, sinks=True, window=3),
]
HALF = [Case(), PLAIN[6], SPECIAL[3], SPECIAL[5]]
RUNS = {
    **{f"float32 {case}": (case, torch.float32, True) for case in PLAIN + SPECIAL},
    **{f"bfloat16 {case}": (case, torch.bfloat16, True) for case in HALF},
    **{f"float16 {case}": (case, torch.float16, True) for case in HALF},
    "float32 without prefix gradients": (Case(), torch.float32, False),
}


def strided_errors() -> dict[str, float]:
    """Of inputs whose last dimension is not the dense one, against the same numbers in order."""
    case = Case()
    inputs = tensors(case, torch.float32)
    plain = run(case, "triton", inputs)
    got = run(case, "triton", {name: x.mT.contiguous().mT for name, x in inputs.items()})
    return {name: relative(got[name], plain[name].double()) for name in plain}


def twice_errors() -> dict[str, float]:
    """Of prefix gradients after two backward passes, against twice those of one."""
    case = Case()
    inputs = tensors(case, torch.float32)
    once = run(case, "triton", inputs)
    twice = run(case, "triton", inputs, passes=2)
    names = ("prefix_key", "prefix_value")
    return {name: relative(twice[name], 2 * once[name].double()) for name in names}


def saved_errors() -> dict[str, float]:
    """Of a call that takes its forward from an earlier one; without it the output is zero."""
    case = Case()
    inputs = tensors(case, torch.float32)
    plain = run(case, "triton", inputs)
    saved = Saved()
    run(case, "triton", inputs, saved=saved)
    got = run(case, "triton", inputs, saved=saved)
    found = {name: relative(got[name], plain[name].double()) for name in plain}
    saved.out.zero_()
    zeros = run(case, "triton", inputs, saved=saved)["out"]
    return found | {"computed again": zeros.norm().item()}


def main() -> None:
    warnings.simplefilter("ignore", RuntimeWarning)  # 0 / 0 in rows past the end, never stored
    found = {
        name: errors(case, "triton", dtype, grad) for name, (case, dtype, grad) in RUNS.items()
    }
    found["strided"] = strided_errors()
    found["twice"] = twice_errors()
    found["saved"] = saved_errors()
    found["calls"] = dict(dispatch.counters[OP])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
