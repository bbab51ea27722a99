"""How exact a scan is inside: whatever its dtype, its last state and some gradients are float32."""

import numpy as np
import torch

from benchmarks.scan.exact import truth
from vim_mm.ops.discretization import METHODS

# What beta and A_bar may be off by, and derivatives: csrc/methods/elementary.h, Accuracy. In
# float32 most of it is `ex2`, by 2^-22, where a form in e^z takes over from a polynomial.
BOUNDS = {
    torch.float32: (2e-6, 3e-6),
    torch.float16: (2e-5, 5e-5),
    torch.bfloat16: (2e-5, 5e-5),
}
PARTS_BOUND = 3e-7  # of a derivative's parts, where they cancel


def driven_by_dt(method, dt):
    """The derivative of beta by dt where a is 0: its part P (csrc/methods/psi.h)."""
    few, inverse = dt.unique(return_inverse=True)
    return truth(method, few, torch.zeros_like(few))[0].real[inverse.numpy(), 4]


def is_psi_method(method):
    """Whether beta is a sum of psi functions, which alone have dbeta/ddt = a beta + P(dt)."""
    dt, a = torch.tensor([0.5, 2.0]).double(), torch.tensor([-1.5, -0.75]).double()
    values = truth(method, dt, a)[0].real
    expected = a.numpy() * values[:, 1] + driven_by_dt(method, dt)
    return np.allclose(values[:, 4], expected, rtol=1e-12)


PSI_METHODS = tuple(method for method in METHODS if is_psi_method(method))
# Those that have gradients of their own in 16 bits, as their Backward says in csrc/methods.
HALF_METHODS = ('bilinear', *PSI_METHODS)


def points(method, dtype):
    """Steps in `dtype` and rates in float32, (points,) each: z in [-1e3, 80], dt in [1e-6, 10]."""
    tails = np.logspace(-6, 3, 37)
    # Where polynomials around 0 end: csrc/methods/fitted.h, in 16 bits and in float32.
    ends = (0.17, 0.18, 0.2, 0.485, 0.624, 0.83, 0.97, 1.248, 1.386)
    ends = np.concatenate([np.linspace(end - 0.01, end + 0.01, 12) for end in ends])
    z = np.concatenate([np.linspace(-1.5, 1.5, 121), -tails, tails[tails < 80], -ends, ends, [0]])
    if method == 'bilinear':  # has a pole at 2
        z = z[z <= 1]
    steps = torch.logspace(-6, 1, 5).to(dtype).repeat_interleave(len(z))
    return steps, torch.tensor(z).repeat(5).float() / steps.float()


def assert_off_by_at_most(bound, name, result, expected, scale):
    error = np.abs(result.detach().cpu().numpy() - expected) / (bound * scale + 1e-36)
    worst = error.argmax()  # a NaN counts as the largest
    assert error[worst] <= 1, f'{name}: {result[worst]}, expected {expected[worst]}'


def parts_by_dt(method, dt, beta):
    """Either of the parts that the derivative of beta by dt is made of, where it is."""
    if method in PSI_METHODS:
        return driven_by_dt(method, torch.from_numpy(dt))
    return beta / dt if method == 'bilinear' else 0 * dt


def check_coefficients(scan, method, dtype, device):
    """beta, its derivatives and A_bar by the last states of one step and of two."""
    bound, gradient_bound = BOUNDS[dtype]
    steps, rates = points(method, dtype)
    expected, scale = truth(method, steps, rates)
    expected = expected.real

    def last_state(u, delta):
        inputs = {
            'u': u.expand(len(steps), -1),
            'delta': delta,
            'B': torch.ones(1, u.shape[1]),
            'C': torch.ones(1, u.shape[1]),
        }
        inputs = {name: x[None].to(device, dtype).contiguous() for name, x in inputs.items()}
        inputs['A'] = rates[:, None].to(device).requires_grad_()
        inputs['delta_bias'] = torch.zeros(len(steps), device=device, requires_grad=True)
        out, last = scan(**inputs, return_last_state=True, discretization_method=method)
        return last.flatten(), inputs, out

    dt, beta = steps.double().numpy(), np.abs(expected[:, 1])
    if dtype == torch.float32:  # e^z is off by as many roundings as z is large
        z = dt * rates.double().numpy()
        scale[:, 0] *= 1 + np.abs(z)
        scale[:, 1:] *= 1 + np.maximum(z, 0)[:, None]
        if method == 'zoh_exact':  # its dbeta/ddt is e^z itself
            scale[:, 4] *= 1 + np.maximum(-z, 0)
    # Derivatives that are made of two parts, which cancel where |z| is large: either is off by a
    # few roundings, and of `bilinear` a reciprocal's. By dt that of `bilinear` through s and that
    # through drive; in 16 bits of psi functions by dt a beta and P, by a dt beta and chi
    # (csrc/methods/psi.h).
    if method == 'bilinear' or dtype != torch.float32:
        least = PARTS_BOUND / gradient_bound
        scale[:, 4] = np.maximum(scale[:, 4], least * parts_by_dt(method, dt, beta))
        if method in PSI_METHODS:
            scale[:, 5] = np.maximum(scale[:, 5], least * dt * beta)
    for length in (1, 20):  # in backward, blocks of few steps, and others
        u = torch.eye(length)[-1:]  # nothing and then 1
        beta, inputs, out = last_state(u, steps[:, None] * u)
        # With a gradient of `out`, if only of zeros: without one no kernel for 16 bits is chosen.
        torch.autograd.backward([beta, out], [torch.ones_like(beta), torch.zeros_like(out)])
        assert_off_by_at_most(bound, 'beta', beta, expected[:, 1], scale[:, 1])
        for name, value, i in (('dbeta/ddt', 'delta_bias', 4), ('dbeta/da', 'A', 5)):
            gradient = inputs[value].grad.flatten()
            assert_off_by_at_most(gradient_bound, name, gradient, expected[:, i], scale[:, i])
    product = expected[:, 0] * expected[:, 1]
    there = np.abs(product) < 1e38
    assert_off_by_at_most(
        2 * bound,
        'A_bar beta',
        last_state(torch.eye(1, 2), steps[:, None].expand(-1, 2))[0][
            torch.tensor(there, device=device)
        ],
        product[there],
        (scale[:, 0] * scale[:, 1])[there],
    )


def check_stiff_step(scan, method, dtype, device):
    """In 16 bits the gradient of a stiff step behind one that is not. Its parts nearly cancel: of
    `bilinear` the states on both sides, of psi functions the state after it and what drives."""
    z = -torch.logspace(-1, 3, 33)
    first, rate = 0.0625, -16.0
    delta = torch.stack([torch.full_like(z, first), z / rate], -1).to(device, dtype)[None]
    delta.requires_grad_()
    one = torch.ones(1, len(z), 2, dtype=dtype, device=device)
    out, last = scan(
        u=one,
        delta=delta,
        A=torch.full((len(z), 1), rate, device=device),
        B=one[:, :1],
        C=one[:, :1],
        return_last_state=True,
        discretization_method=method,
    )
    weight = 1024.0  # or float16 has no more than a few bits of what comes
    # As above, with a gradient of `out`.
    torch.autograd.backward([last, out], [torch.full_like(last, weight), torch.zeros_like(out)])
    steps = delta.detach().double().cpu()[0]
    values = truth(method, steps.flatten(), torch.full((2 * len(z),), rate))[0].real
    before = values[::2, 1]  # beta of the first step
    A_bar, beta, A_bar_dt, _, beta_dt, _ = values[1::2].T
    expected = A_bar_dt * before + beta_dt
    dt = steps[:, 1].numpy()
    bound = torch.finfo(dtype).eps / 2 + BOUNDS[dtype][1]
    if method == 'bilinear':
        through_s = rate / 4 * (A_bar + 1) ** 2 * (before + dt / 2)
        scale = np.abs(through_s) + (A_bar + 1) / 2
    else:
        parts = np.abs(rate) * (A_bar * before + beta) + parts_by_dt(method, dt, beta)
        scale = np.abs(expected) + PARTS_BOUND / bound * parts
    result = delta.grad[0, :, 1].double() / weight
    assert_off_by_at_most(bound, 'dstate/ddt', result, expected, scale)


def check_step_sizes(scan, dtype, device):
    """softplus, by one step of `zoh`, whose beta it is."""
    x = torch.linspace(-80, 80, 1281).to(dtype)
    one = torch.ones(1, len(x), 1, dtype=dtype, device=device)
    _, last = scan(
        u=one,
        delta=x.to(device)[None, :, None],
        A=torch.zeros(len(x), 1, device=device),
        B=one[:, :1],
        C=one[:, :1],
        delta_softplus=True,
        return_last_state=True,
    )
    expected = np.logaddexp(0, x.double().numpy())
    assert_off_by_at_most(BOUNDS[dtype][0], 'dt', last.flatten(), expected, expected)
