"""The memory of the native mixer, as the operator tells it, which needs no GPU."""

import os
import subprocess
import sys
from itertools import pairwise, product

import pytest
import torch

from vim_mm.ops.block import FusedMixer, fused_mixer
from vim_mm.ops.discretization import method_id
from vim_mm.ops.library import MISSING

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
FORMS = {'none': (1, 1), 'v1': (2, 1), 'v2': (2, 2)}  # directions, and sets of parameters
SIZES = [12, 4, 3, 4]  # H, N, R and W
OUTER = 8


def workspace(part, *, batch=2, length=70, form='v2', types=0, **options):
    """Of each buffer: name to (begin, end, number of the one that it replaces)."""
    directions, sets = FORMS[form]
    options = {'dtype': torch.bfloat16, 'normed': True, 'method': method_id('zoh')} | options
    types = [types] * (4 + 6 * sets + directions)
    alignment, names, offsets, sizes, replaced = torch.ops.vim_mm.mixer_workspace(
        part, batch, length, OUTER, SIZES, types, *options.values(), directions
    )
    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    buffers = dict(zip(names.split(), zip(offsets, ends, replaced, strict=True), strict=True))
    assert len(buffers) == len(offsets)  # no name stands twice
    return alignment, buffers


@pytest.mark.parametrize('part', ['saved', 'forward', 'backward'])
@pytest.mark.parametrize('form', FORMS)
def test_buffers_do_not_overlap(part, form):
    """But for those that say so, which lie within what they replace."""
    dtypes = (torch.float32, torch.bfloat16)
    for dtype, normed, length, types in product(dtypes, (True, False), (1, 7, 64), (0, 2)):
        alignment, buffers = workspace(
            part, form=form, dtype=dtype, normed=normed, length=length, types=types
        )
        own = [b for b in buffers.values() if b[2] < 0]
        assert all(begin % alignment == 0 for begin, _, _ in own)
        for (_, end, _), (begin, _, _) in pairwise(own):
            assert end <= begin < end + alignment
        for begin, end, replaced in buffers.values():
            if replaced >= 0:
                first, last, _ = [*buffers.values()][replaced]
                assert first <= begin and end <= last


def test_sizes():
    """Bytes of what backward takes, in bfloat16: activations 2, the others 4."""
    tokens, channels, states, rank, taps = 2 * 70, *SIZES
    _, buffers = workspace('saved')
    sizes = {name: end - begin for name, (begin, end, _) in buffers.items()}
    assert sizes['in_proj'] == 2 * (2 * channels * OUTER)
    assert sizes['conv'] == 4 * (2 * channels * taps)
    assert sizes['A'] == 4 * (2 * channels * states)
    assert sizes['normed'] == 2 * (tokens * OUTER)
    assert sizes['rstd'] == 4 * tokens
    assert sizes['xz'] == 2 * (2 * channels * tokens)
    assert sizes['dt_B_C'] == 2 * (2 * (rank + 2 * states) * tokens)
    assert sizes['edges'] == 4 * (2 * 2 * channels * 2 * states)  # of two chunks of 64 steps
    assert sizes['sum'] == 2 * (channels * tokens)


def test_of_the_gradients_only_those_that_are_not_float32_are_converted():
    for types, expected in ((0, 0), (2, 4 * 2 * SIZES[0] * OUTER), (-1, 0)):
        begin, end, _ = workspace('backward', types=types)[1]['in_proj']
        assert end - begin == expected


def test_wrong_arguments_are_errors():
    with pytest.raises(RuntimeError, match='saved, forward or backward, not all'):
        workspace('all')
    with pytest.raises(RuntimeError, match='unknown discretization'):
        workspace('saved', method=99)
    with pytest.raises(RuntimeError, match='float32, float16 or bfloat16'):
        workspace('saved', dtype=torch.float64)


def mixer_parameters(directions, sets):
    channels, states, rank, taps = SIZES
    each = [(channels, 1, taps), channels, (rank + 2 * states, channels), (channels, rank)]
    each += [channels, channels]
    shapes = [(2 * channels, OUTER), 2 * channels, (OUTER, channels), OUTER, *each * sets]
    return [torch.empty(s, device='meta') for s in [*shapes, *[(channels, states)] * directions]]


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('method', ['zoh', 'poly'])
def test_fake_kernel_has_the_bytes_of_the_operator(form, method):
    """At any size: what it asks for at three points is linear."""
    parameters = mixer_parameters(*FORMS[form])
    directions = FORMS[form][0]
    options = (method_id(method), [0, 1][:directions], 0.5)
    for batch, length in ((1, 1), (3, 63), (2, 64), (5, 65), (2, 4097)):
        x = torch.empty(batch, length, OUTER, device='meta', dtype=torch.float16)
        norm = torch.empty(OUTER, device='meta')
        (saved,) = torch.ops.vim_mm.mixer_fwd(
            x, None, norm, 1e-5, x.dtype, parameters, *options, True
        )[2]
        sizes = dict(batch=batch, length=length, form=form)
        alignment, buffers = workspace('saved', **sizes, dtype=x.dtype, method=options[0])
        end = max(end for _, end, _ in buffers.values())
        assert saved.shape == (-(-end // alignment) * alignment,) and saved.dtype == torch.uint8


def test_sizes_may_be_symbols():
    """One graph for all images: B and L are symbols in the bytes that forward saves."""
    mixer = FusedMixer(mixer_parameters(2, 2), method_id('zoh'), [0, 1], 0.5)
    traced = []

    def count(graph, _):
        traced.append(graph)
        return graph

    def loss(x):
        return fused_mixer(x, mixer).sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=count)
    for batch, length in ((2, 9), (3, 70), (4, 130)):
        compiled(torch.empty(batch, length, OUTER, device='meta', requires_grad=True))
    assert len(traced) == 1


@pytest.mark.slow  # starts Python twice
def test_a_buffer_may_be_an_allocation_of_its_own():
    """By a variable that is read once: in another process."""
    code = f'from {__name__} import print_separate; print_separate()'

    def run(value):
        environment = {**os.environ, 'VIM_MM_SEPARATE_BUFFERS': value}
        command = [sys.executable, '-c', code]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    assert run('1').stdout == 'each\n'
    assert 'VIM_MM_SEPARATE_BUFFERS=yes: expected 0 or 1' in run('yes').stderr


def print_separate():
    alignment, buffers = workspace('saved')
    x = torch.empty(2, 70, OUTER, device='meta', dtype=torch.bfloat16)
    options = (method_id('zoh'), [0, 1], 0.5, True)
    saved = torch.ops.vim_mm.mixer_fwd(
        x, None, torch.empty(OUTER, device='meta'), 1e-5, x.dtype, mixer_parameters(2, 2), *options
    )[2]
    assert alignment == 0
    assert [t.numel() for t in saved] == [end for _, end, _ in buffers.values()]
    print('each')
