"""Wrong calls of the scan's raw operators, in front of which no Python checks anything."""

import pytest
import torch

from vim_mm.ops.reference import TENSORS

f16, f32, f64, c64, c128 = (
    torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128
)  # fmt: skip
B, G, H, L, N = 2, 2, 3, 5, 4
SHAPES = dict(
    u=(B, G, H, L), delta=(B, G, H, L), A=(G, H, N), B=(B, G, N, L), C=(B, G, N, L), D=(G, H),
    z=(B, G, H, L), delta_bias=(G, H), grad_out=(B, G, H, L), grad_last_state=(B, G, H, N),
)  # fmt: skip
ROWS = ('u', 'delta', 'z', 'grad_out')


def legal_call() -> dict:
    call = {name: torch.rand(shape) for name, shape in SHAPES.items()}
    call |= dict(initial_state=None, reset=None)
    return call | dict(delta_softplus=True, method=0, reverse=[0, 1])


def scan(call: dict, ops=torch.ops.vim_mm, backward: bool = False) -> tuple[torch.Tensor, ...]:
    """What the operator gives; the backward one after the forward one of a legal call."""
    given = [call[name] for name in TENSORS]
    options = [call[name] for name in ('delta_softplus', 'method', 'reverse')]
    if not backward:
        return ops.selective_scan_fwd(*given, *options)
    edges = call['edges'] if 'edges' in call else scan(legal_call(), ops)[2]
    gradients = call['grad_out'], call['grad_last_state']
    return ops.selective_scan_bwd(*gradients, edges, *given, *options)


def _grown(name: str, axis: int, by: int) -> tuple[str, object, str]:
    shape = list(SHAPES[name])
    shape[axis] += by
    return name, torch.rand(shape), f'wrong shape of {name}$'


# Argument, value, what the message says.
WRONG = [
    *(_grown(name, -1, by) for name in SHAPES if name not in ('u', 'A') for by in (-1, 1, 100)),
    *(_grown(name, 0, 1) for name in SHAPES if name != 'u'),
    *((name, torch.rand(3), f'wrong shape of {name}$') for name in SHAPES if name not in 'uA'),
    *((name, torch.rand(SHAPES[name]).int(), f'wrong dtype of {name}$') for name in SHAPES),
    *((name, torch.rand(SHAPES[name]).bool(), f'wrong dtype of {name}$') for name in SHAPES),
    *((name, torch.rand(SHAPES[name], dtype=f64), f'wrong dtype of {name}$')
      for name in ('delta', 'z', 'B', 'C', 'grad_out', 'grad_last_state')),
    *((name, torch.rand(SHAPES[name], dtype=c64), f'wrong dtype of {name}$')
      for name in SHAPES if name != 'A'),
    ('grad_out', torch.rand(SHAPES['u'], dtype=f16), 'wrong dtype of grad_out$'),
    ('u', torch.rand(SHAPES['u'], dtype=f64), 'wrong dtype of delta$'),
    ('u', torch.rand(B, G, H), r'expected u \[B, G, H, L\] and A'),
    ('A', torch.rand(G, H), r'expected u \[B, G, H, L\] and A'),
    ('A', torch.rand(SHAPES['A'], dtype=c128), 'wrong dtype of B$'),
    ('A', torch.rand(G, H, 0), 'expected A with 1 to 256 states, got 0'),
    ('A', torch.rand(G, H, 257), 'expected A with 1 to 256 states, got 257'),
    *(('initial_state', torch.rand(shape), 'wrong shape of initial_state$')
      for shape in ((B, G, H, N + 1), (B, G, H + 1, N), (B, G * H, N), (G, H, N))),
    *(('initial_state', torch.rand(SHAPES['grad_last_state']).to(dtype),
       'wrong dtype of initial_state$') for dtype in (f16, f64, c64, torch.bool)),
    *(('reset', torch.zeros(shape).bool(), 'wrong shape of reset$')
      for shape in ((B, L + 1), (B + 1, L), (L,), (B, G, L))),
    *(('reset', torch.zeros(B, L).to(dtype), 'wrong dtype of reset$')
      for dtype in (torch.uint8, torch.int64, f32)),
    ('method', 7, 'unknown discretization number 7'),
    ('method', -1, 'unknown discretization number -1'),
    ('reverse', [0], 'one reverse flag per group'),
    ('reverse', [0, 1, 0], 'one reverse flag per group'),
]  # fmt: skip
each_wrong_call = pytest.mark.parametrize(
    ('name', 'value', 'message'),
    [pytest.param(*case, id=f'{case[0]}-{i}') for i, case in enumerate(WRONG)],
)


def assert_refused(name: str, value: object, message: str, ops=torch.ops.vim_mm) -> None:
    """By the backward operator, and by the forward one, which has no gradients."""
    call = legal_call() | {name: value}
    for backward in (False, True):
        if backward or not name.startswith('grad'):
            with pytest.raises(RuntimeError, match=message):
                scan(call, ops, backward)


# Sizes that int64 counts, and their product with others, or in bytes, not.
HUGE = [
    dict(u=(2**58, 1, 1, 1), delta=(2**58, 1, 1, 1), A=(1, 1, 1), B=(2**58, 1, 1, 1)),
    dict(u=(1, 1, 2**58, 1), delta=(1, 1, 2**58, 1), A=(1, 2**58, 1), B=(1, 1, 1, 1)),
    dict(u=(1, 1, 1, 2**58), delta=(1, 1, 1, 2**58), A=(1, 1, 1), B=(1, 1, 1, 2**58)),
    dict(u=(2**31, 1, 2**29, 1), delta=(2**31, 1, 2**29, 1), A=(1, 2**29, 256), B=(1, 2**29, 256)),
    dict(u=(2**60, 1, 0, 4), delta=(2**60, 1, 0, 4), A=(1, 0, 8), B=(1, 0, 8)),
]


def assert_too_large(sizes: dict, ops=torch.ops.vim_mm) -> None:
    call = legal_call() | dict.fromkeys(('D', 'z', 'delta_bias', 'grad_out', 'grad_last_state'))
    call |= {name: torch.zeros((1,) * len(n)).expand(n) for name, n in sizes.items()}
    call |= dict(C=call['B'], reverse=[0], edges=torch.zeros(0))
    for backward in (False, True):
        with pytest.raises(RuntimeError, match='sizes of a scan are too large'):
            scan(call, ops, backward)
