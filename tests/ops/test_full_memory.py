"""An operator that gets no memory, by stand-ins that fail as torch's C interface does."""

from types import SimpleNamespace

import pytest
import torch

from vim_mm.mistakes import explain
from vim_mm.ops import block, library, selective_scan_fn

# As an H100 said it.
MESSAGE = 'aoti_torch_empty_strided(...) API call failed at csrc/cuda/ops/tensors.h, line 33'


def fail(*arguments):
    raise RuntimeError(MESSAGE)


@pytest.fixture
def full(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'mem_get_info', lambda device: (2**29, 80 * 2**30))


def scan():
    u, A, B = torch.rand(1, 4, 5), torch.rand(4, 2), torch.rand(1, 2, 5)
    selective_scan_fn(u, u, A, B, B, backend='native')


def norm(requires_grad):
    x = torch.rand(2, 3, requires_grad=requires_grad)
    block.add_rms_norm(x, None, torch.rand(3), 1e-5, torch.float32)


def mixer(requires_grad):
    parameters = [torch.rand(2, 2, 2, requires_grad=requires_grad)]
    block.fused_mixer(torch.rand(1, 2, 3), block.FusedMixer(parameters, 0, [False], 1.0))


@pytest.mark.skipif(library.MISSING is not None, reason='needs the compiled library')
def test_the_scan_raises_what_torch_does(full, monkeypatch):
    monkeypatch.setattr(torch.ops.vim_mm, 'selective_scan_fwd', fail)
    with pytest.raises(torch.cuda.OutOfMemoryError, match=r'0\.50 GiB free of 80\.00.*with_cp'):
        scan()


@pytest.mark.parametrize('requires_grad', [False, True])
@pytest.mark.parametrize('call', [norm, mixer])
def test_the_block_raises_what_torch_does(call, requires_grad, full, monkeypatch):
    monkeypatch.setattr(block, '_ops', SimpleNamespace(add_rms_norm_fwd=fail, mixer_fwd=fail))
    with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
        call(requires_grad)
    assert explain(caught.value).startswith('CUDA out of memory in an operator of vim_mm: ')
    assert str(caught.value.__cause__) == MESSAGE


@pytest.mark.parametrize('text', ['A has no numbers', MESSAGE])
def test_other_errors_stay_what_they_are(text, monkeypatch):
    """So does that of a GPU which has failed: it gets no memory either."""

    def broken(*arguments):
        raise RuntimeError(text)

    def no_answer(device):
        raise RuntimeError('CUDA error: an illegal memory access was encountered')

    monkeypatch.setattr(torch.cuda, 'mem_get_info', no_answer)
    with pytest.raises(RuntimeError) as caught:
        library.call(broken, torch.rand(2))
    assert type(caught.value) is RuntimeError and str(caught.value) == text
