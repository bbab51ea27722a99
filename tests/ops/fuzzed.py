"""Random calls of the raw operators, for a process under sanitizers.

    python -m tests.ops.fuzzed LIBRARY NAMESPACE CASES SEED

tests/ops/test_raw_operators.py starts it. A call is made of legal arguments, of which one may then
be changed. Where it is legal by csrc/ops.cpp, as :func:`is_legal` transcribes that, its results are
compared with those of the reference in float64; else it has to raise. Nothing may end the process.
"""

import math
import random
import sys
from collections import Counter
from collections.abc import Sequence

import torch

from vim_mm.ops.discretization import IS_CAUSAL, METHODS, discretize
from vim_mm.ops.reference import DIFFERENTIABLE, TENSORS, ScanInputs, grouped_scan_ref

NARROW = (torch.float32, torch.float16, torch.bfloat16)
REAL = (*NARROW, torch.float64)
OTHERS = (torch.int32, torch.int64, torch.bool, torch.uint8, torch.complex32, torch.float8_e5m2)
HUGE = 2**40  # no memory has so many rows, or steps


def state_dtype(call: dict) -> torch.dtype:
    wide = call['u'].dtype == torch.float64
    if call['A'].is_complex():
        return torch.complex128 if wide else torch.complex64
    return torch.float64 if wide else torch.float32


def normal(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(tuple(shape), dtype=torch.complex128 if dtype.is_complex else None).to(dtype)


def small(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Lengths of steps, which without softplus are that."""
    return (0.1 * torch.randn(tuple(shape))).abs().to(dtype)


def decaying(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A."""
    real = -torch.rand(tuple(shape), dtype=torch.float64)
    return (torch.complex(real, torch.randn_like(real)) if dtype.is_complex else real).to(dtype)


def flags(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.rand(tuple(shape)) < 0.3


def values(rng: random.Random, shape: tuple, dtype: torch.dtype, of=normal) -> torch.Tensor:
    """Random numbers in memory of some layout."""
    layout = rng.choice(['contiguous', 'permuted', 'sliced', 'offset', 'expanded'])
    if layout == 'permuted':
        order = rng.sample(range(len(shape)), len(shape))
        x = of([shape[i] for i in order], dtype)
        return x.permute([order.index(i) for i in range(len(shape))])
    if layout == 'sliced':
        return of([2 * n for n in shape], dtype)[tuple(slice(None, None, 2) for _ in shape)]
    if layout == 'offset':
        return of([n + 1 for n in shape], dtype)[tuple(slice(1, None) for _ in shape)]
    if layout == 'expanded':
        place = rng.randrange(len(shape))
        return of([1 if i == place else n for i, n in enumerate(shape)], dtype).expand(shape)
    return of(shape, dtype)


def make_call(rng: random.Random) -> dict:
    """Legal arguments of the forward operator, and the incoming gradients of the backward one."""
    batch, groups, channels = (
        rng.choice([0, 1, 1, 2, 3]),
        rng.choice([1, 1, 2, 3]),
        rng.randrange(6),
    )
    steps = rng.choice([0, 1, 2, 5, 17, 33, 70])
    states = rng.choice([1, 2, 3, 7, 8, 9, 16, 17, 33, 256 if steps < 20 else 4])
    wide, is_complex = rng.random() < 0.3, rng.random() < 0.3
    signal = (lambda: torch.float64) if wide else (lambda: rng.choice(NARROW))
    state = {(0, 0): torch.float32, (1, 0): torch.float64, (0, 1): torch.complex64}.get(
        (int(wide), int(is_complex)), torch.complex128
    )
    bghl, gh = (batch, groups, channels, steps), (groups, channels)
    parameter = rng.choice([torch.complex64, torch.complex128]) if is_complex else rng.choice(REAL)

    def matrix() -> torch.Tensor:
        constant = rng.random() < 0.3
        shape = (*gh, states) if constant else (batch, groups, states, steps)
        return values(rng, shape, state if is_complex else signal())

    call = dict(
        u=values(rng, bghl, signal()), delta=values(rng, bghl, signal(), small),
        A=values(rng, (*gh, states), parameter, decaying), B=matrix(), C=matrix(),
        D=values(rng, gh, rng.choice(REAL)), z=values(rng, bghl, signal()),
        delta_bias=values(rng, gh, rng.choice(REAL), small),
        delta_softplus=rng.random() < 0.5,
        method=rng.choice([method.id for method in METHODS.values()]),
        reverse=[rng.randrange(2) for _ in range(groups)],
    )  # fmt: skip
    call['initial_state'] = values(rng, (*bghl[:3], states), state)
    call['reset'] = values(rng, (batch, steps), torch.bool, flags)
    if not IS_CAUSAL[call['method']]:
        call['initial_state'] = None
    for name in ('D', 'z', 'delta_bias', 'initial_state', 'reset'):
        if rng.random() < 0.3:
            call[name] = None
    call['grad_out'] = values(rng, bghl, call['u'].dtype) if rng.random() < 0.8 else None
    last = values(rng, (*bghl[:3], states), state) if rng.random() < 0.5 else None
    call['grad_last_state'] = last
    return call


def changed(rng: random.Random, call: dict) -> dict:
    """The same with one argument changed: illegal then, unless chance has it otherwise."""
    names = [name for name, x in call.items() if isinstance(x, torch.Tensor)]
    name = rng.choice([*names, *names, 'method', 'reverse'])
    x = call[name]
    if name == 'method':
        return call | {name: rng.choice([-1, 7, 8, 2**31, 2**40, -(2**63)])}
    if name == 'reverse':
        return call | {name: rng.choice([[], x[1:], [*x, 1], [5] * len(x)])}
    what = rng.choice(['dtype', 'dtype', 'size', 'rank', 'huge', 'sparse', 'empty'])
    if what == 'dtype':
        dtype = rng.choice([*REAL, torch.complex64, torch.complex128, *OTHERS])
        return call | {name: (x.real if x.is_complex() and not dtype.is_complex else x).to(dtype)}
    if what == 'sparse':
        return call | {name: x.to_sparse() if x.numel() else x.unsqueeze(0)}
    if what == 'rank':
        return call | {
            name: rng.choice([x.flatten(), x.unsqueeze(0), x.new_zeros(()), x[None, None]])
        }
    sizes, place = [*x.shape], rng.randrange(x.dim())
    if what == 'huge':
        return call | enlarged(rng, {name: call[name] for name in names})
    sizes[place] = 0 if what == 'empty' else sizes[place] + rng.choice([-1, 1, 7])
    of = {'A': decaying, 'delta': small, 'delta_bias': small, 'reset': flags}.get(name, normal)
    return call | {name: of([max(n, 0) for n in sizes], x.dtype)}


def enlarged(rng: random.Random, tensors: dict) -> dict:
    """One of the sizes, of all tensors that have it, so large that int64 just counts them."""
    letter = rng.choice('bhl')
    letters = {3: 'ghn', 2: 'gh'}
    axes = {
        name: letters.get(x.dim(), 'bgnl' if name in 'BC' else 'bghl')
        for name, x in tensors.items()
    }
    axes |= {name: 'bghn' for name in axes if name in ('grad_last_state', 'initial_state')}
    axes |= {name: 'bl' for name in axes if name == 'reset'}
    sizes = {a: max(n, 1) for name, x in tensors.items() for a, n in zip(axes[name], x.shape)}
    sizes[letter] = 2**61 // math.prod(n for a, n in sizes.items() if a != letter)
    return {
        name: x[tuple(slice(1) if a == letter else slice(None) for a in axes[name])].expand(
            [sizes[a] if a == letter else n for a, n in zip(axes[name], x.shape)]
        )
        for name, x in tensors.items()
        if letter in axes[name] and x.shape[axes[name].index(letter)] > 0
    }


def is_legal(call: dict, with_gradients: bool) -> bool:
    """By the comments of csrc/ops.cpp."""
    tensors = {name: x for name, x in call.items() if isinstance(x, torch.Tensor)}
    if not with_gradients:
        tensors = {name: x for name, x in tensors.items() if not name.startswith('grad')}
    if any(x.layout != torch.strided for x in tensors.values()):
        return False
    u, A = call['u'], call['A']
    if u.dim() != 4 or A.dim() != 3 or not 1 <= A.shape[2] <= 256:
        return False
    batch, groups, channels, steps = u.shape
    states = A.shape[2]
    if any(n >= HUGE for n in u.shape):
        return False
    bghl, gh, ghn = tuple(u.shape), (groups, channels), (groups, channels, states)
    shapes = dict(
        u=[bghl], delta=[bghl], z=[bghl], grad_out=[bghl], A=[ghn], D=[gh], delta_bias=[gh],
        B=[ghn, (batch, groups, states, steps)], grad_last_state=[(*bghl[:3], states)],
    )  # fmt: skip
    shapes |= dict(C=shapes['B'], initial_state=shapes['grad_last_state'], reset=[(batch, steps)])
    signal = (torch.float64,) if u.dtype == torch.float64 else NARROW
    dtypes = dict.fromkeys(('u', 'delta', 'z'), signal) | dict.fromkeys(('D', 'delta_bias'), REAL)
    dtypes['A'] = (*REAL, torch.complex64, torch.complex128)
    dtypes['B'] = dtypes['C'] = (state_dtype(call),) if A.is_complex() else signal
    dtypes['grad_out'], dtypes['reset'] = (u.dtype,), (torch.bool,)
    dtypes['grad_last_state'] = dtypes['initial_state'] = (state_dtype(call),)
    return (
        all(tuple(x.shape) in shapes[name] for name, x in tensors.items())
        and all(x.dtype in dtypes[name] for name, x in tensors.items())
        and len(call['reverse']) == groups
        and call['method'] in IS_CAUSAL
        and (call['initial_state'] is None or IS_CAUSAL[call['method']])
    )


def run(ops, call: dict, backward: bool) -> list[torch.Tensor]:
    tensors = [call[name] for name in TENSORS]
    options = (call['delta_softplus'], call['method'], call['reverse'])
    if not backward:
        return list(ops.selective_scan_fwd(*tensors, *options)[:2])
    gradients, edges = (call['grad_out'], call['grad_last_state']), torch.empty(0)
    return list(ops.selective_scan_bwd(*gradients, edges, *tensors, *options))


def expected(call: dict, backward: bool) -> list[torch.Tensor]:
    """What the reference gives in float64."""

    def wide(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.complex128 if x.is_complex() else torch.float64)

    tensors = [None if call[n] is None else wide(call[n]).requires_grad_() for n in DIFFERENTIABLE]
    options = (call['delta_softplus'], call['method'], [flag != 0 for flag in call['reverse']])
    results = grouped_scan_ref(ScanInputs(*tensors, call['reset'], *options))
    if not backward:
        return [x.detach() for x in results]
    given = (call['grad_out'], call['grad_last_state'])
    pairs = [(x, wide(g)) for x, g in zip(results, given, strict=True) if g is not None]
    leaves = [x for x in tensors if x is not None]
    if not pairs:
        return [torch.zeros(0) if x is None else torch.zeros_like(x) for x in tensors]
    outputs, gradients = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outputs, leaves, gradients, materialize_grads=True))
    return [torch.zeros(0) if x is None else next(found) for x in tensors]


def compare(found: list[torch.Tensor], wanted: list[torch.Tensor], call: dict) -> None:
    for i, (x, y) in enumerate(zip(found, wanted, strict=True)):
        assert x.shape == y.shape, f'result {i} has shape {tuple(x.shape)}, not {tuple(y.shape)}'
        if x.numel() == 0:
            continue
        bound = {torch.float16: 4e-3, torch.bfloat16: 3e-2}.get(x.dtype, 2e-4)
        if call['u'].dtype == torch.float64 and x.dtype in (torch.float64, torch.complex128):
            bound = 1e-9
        scale = max(y.abs().max().item(), 1.0)
        error = (x.to(y.dtype) - y).abs().max().item()
        assert error <= bound * scale, f'result {i} is off by {error:.1e} of {scale:.1e}'


def scan(rng: random.Random, ops, kinds: Counter) -> None:
    call = make_call(rng)
    if rng.random() < 0.6:
        call = changed(rng, call)
    for backward in (False, True):
        kind = 'backward' if backward else 'forward'
        try:
            found = run(ops, call, backward)
        except RuntimeError as error:
            assert not is_legal(call, backward), f'{kind}: a legal call was refused: {error}'
            kinds[f'{kind} refused'] += 1
            continue
        assert is_legal(call, backward), f'{kind}: an illegal call was taken'
        try:
            compare(found, expected(call, backward), call)
        except AssertionError as error:
            given = {
                n: x if not isinstance(x, torch.Tensor) else (x.dtype, tuple(x.shape))
                for n, x in call.items()
            }
            raise AssertionError(f'{error}, {kind} of {given}') from error
        kinds[f'{kind} right'] += 1


def coefficients(rng: random.Random, ops, kinds: Counter) -> None:
    """The operator `discretize`."""
    shape = tuple(rng.randrange(6) for _ in range(rng.randrange(4)))
    wide, method = rng.random() < 0.5, rng.choice([*METHODS.values()])
    dtype = torch.float64 if wide else torch.float32
    delta = torch.rand(shape, dtype=dtype)
    A = -torch.rand(shape, dtype=rng.choice([dtype, dtype.to_complex()]))
    number = method.id
    legal = rng.random() < 0.5
    if not legal:
        what = rng.randrange(4)
        if what == 0:
            number = rng.choice([-1, 7, 2**40])
        elif what == 1:
            delta = delta.to(rng.choice([torch.int32, torch.float16, *OTHERS]))
        elif what == 2:
            A = A.to(torch.complex64 if wide else torch.float64)
        else:
            delta = torch.rand((*shape, 2), dtype=dtype)
    try:
        found = ops.discretize(delta, A, number)
    except RuntimeError as error:
        assert not legal, f'discretize: a legal call was refused: {error}'
        kinds['discretize refused'] += 1
        return
    assert legal, 'discretize: an illegal call was taken'
    assert found.shape == (6, *shape)
    wanted = discretize(
        delta.double(), A.to(torch.promote_types(A.dtype, torch.float64)), method.name
    )
    for x, y in zip(found, wanted, strict=False):  # A_bar and beta
        torch.testing.assert_close(x.to(y.dtype), y, rtol=1e-4, atol=1e-6)
    kinds['discretize right'] += 1


def main(library: str, namespace: str, cases: str, seed: str) -> None:
    torch.set_num_threads(2)  # so that rows go to threads
    torch.ops.load_library(library)
    ops, kinds = getattr(torch.ops, namespace), Counter()
    first = 1_000_000 * int(seed)
    for case in range(first, first + int(cases)):
        rng = random.Random(case)
        torch.manual_seed(case)
        print('case', case, file=sys.stderr, flush=True)  # the last one is what ended the process
        try:
            (coefficients if case % 10 == 0 else scan)(rng, ops, kinds)
        except AssertionError as error:
            raise AssertionError(f'case {case}: {error}') from error
    print(dict(kinds), ops.cpu_capability())


if __name__ == '__main__':
    main(*sys.argv[1:])
