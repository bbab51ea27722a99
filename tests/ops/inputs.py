"""Random inputs of the scan, and what to compare of a run."""

import torch


def make_inputs(
    batch=2, channels=4, length=6, states=3, form='shared', is_complex=False, dtype=torch.float64
):
    """Keyword arguments of ``selective_scan_fn``, all of them, requiring grad.

    ``form`` is that of B and C: 'constant' (D, N), 'shared' (B, N, L), 'grouped' (B, 2, N, L),
    'constant_B_grouped_C', or 'interleaved' (B, 2, N, 2L) with complex A.
    """
    is_complex = is_complex or form == 'interleaved'
    state_dtype = dtype.to_complex() if is_complex else dtype
    shapes = {
        'constant': (channels, states),
        'shared': (batch, states, length),
        'grouped': (batch, 2, states, length),
        'interleaved': (batch, 2, states, 2 * length),
    }
    form_B, form_C = ('constant', 'grouped') if form == 'constant_B_grouped_C' else (form, form)
    matrix_dtype = dtype if form == 'interleaved' else state_dtype
    A = -4 * torch.rand(channels, states, dtype=dtype)
    if is_complex:
        A = torch.complex(A, torch.randn(channels, states, dtype=dtype))
    inputs = {
        'u': torch.randn(batch, channels, length, dtype=dtype),
        'delta': torch.randn(batch, channels, length, dtype=dtype),
        'A': A,
        'B': torch.randn(shapes[form_B], dtype=matrix_dtype),
        'C': torch.randn(shapes[form_C], dtype=matrix_dtype),
        'D': torch.randn(channels, dtype=dtype),
        'z': torch.randn(batch, channels, length, dtype=dtype),
        'delta_bias': torch.randn(channels, dtype=dtype),
    }
    # Without softplus delta + bias is the step itself: keep |z| where exact arithmetic is tame.
    inputs['delta'] *= 0.1
    inputs['delta_bias'] *= 0.1
    return {name: x.requires_grad_() for name, x in inputs.items()}


def inputs_in(dtype, **sizes):
    """Those of ``make_inputs`` with parameters in float32, and what varies in time in ``dtype``."""
    inputs = make_inputs(dtype=torch.float32, **sizes)
    for name in ('u', 'delta', 'z', 'B', 'C'):
        inputs[name] = inputs[name].detach().to(dtype).requires_grad_()
    return inputs


def grouped_inputs(groups, shared=(), **sizes):
    """Keyword arguments of ``selective_scan_grouped_fn``; the shared ones have stride 0."""
    parts = [make_inputs(**sizes) for _ in range(groups)]
    inputs = {}
    for name in parts[0]:
        dim = 0 if name in ('A', 'D', 'delta_bias') else 1
        if name in shared:
            first = parts[0][name].unsqueeze(dim)
            inputs[name] = first.expand(*first.shape[:dim], groups, *first.shape[dim + 1 :])
        else:
            inputs[name] = torch.stack([part[name] for part in parts], dim=dim)
    return inputs


def strided_copies(inputs):
    """The same numbers: rank 3 with its last two dimensions stored the other way round, else every
    other entry of a tensor."""
    copies = {}
    for name, x in inputs.items():
        x = x.detach()
        if x.dim() == 3:
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        else:
            x = torch.stack([x, x], dim=-1)[..., 0]
        copies[name] = x.requires_grad_()
    return copies


def rows_of_uneven_blocks():
    """Rows, in eights, that make a few blocks more than the GPU has multiprocessors."""
    processors = torch.cuda.get_device_properties('cuda').multi_processor_count
    return 8 * (processors + processors // 4)


def of_channels(inputs, part):
    """The inputs of some channels alone, which share B and C with the others."""
    return {
        name: x if name in 'BC' else x[part] if x.dim() < 3 else x[:, part]
        for name, x in inputs.items()
    }


def results_and_gradients(scan, inputs, **options):
    """out, last_state and the gradient of every input, for a loss that uses both outputs."""
    out, last_state = scan(**inputs, return_last_state=True, **options)
    generator = torch.Generator().manual_seed(1)
    # bfloat16 numbers, which every dtype of out holds exactly: the gradient of out is its weight.
    weights = [
        torch.randn(x.shape, generator=generator).bfloat16().to(x) for x in (out, last_state)
    ]
    loss = sum((torch.real(x) * torch.real(w)).sum() for x, w in zip((out, last_state), weights))
    grads = torch.autograd.grad(loss, list(inputs.values()))
    named = {f'grad_{name}': grad for name, grad in zip(inputs, grads, strict=True)}
    return {'out': out.detach(), 'last_state': last_state.detach(), **named}


def worst_error(value, expected):
    """Largest error relative to the largest entry of what was expected (absolute if that is 0)."""
    if expected.numel() == 0:
        return 0.0
    scale = expected.abs().max().item() or 1.0
    return (value - expected).abs().max().item() / scale
