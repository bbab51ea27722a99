"""Vim as its paper writes it (arXiv 2401.09417, equations 1 to 8 and Algorithm 1), token by token.

An independent yardstick for vim_mm.models: nothing here is shared with the project. Weights come as
a state dict with the names of Vim's released checkpoints. The backward direction really flips.
"""

import math

import torch


def silu(x):
    return x / (1 + torch.exp(-x))


def zoh_scan(u, delta, A, B, C):
    """u, delta (B, L, E); A (E, N); B, C (B, L, N): y (B, L, E)."""
    h = torch.zeros(*u[:, 0].shape, A.shape[1], dtype=u.dtype)
    y = []
    for t in range(u.shape[1]):
        A_bar = torch.exp(delta[:, t, :, None] * A)
        B_bar = delta[:, t, :, None] * B[:, t, None, :]
        h = A_bar * h + B_bar * u[:, t, :, None]
        y.append(torch.einsum('ben,bn->be', h, C[:, t]))
    return torch.stack(y, dim=1)


def short_conv(x, weight, bias):
    """Causal, depthwise; x (B, L, E), weight (E, 1, W)."""
    out = bias.expand_as(x).clone()
    width = weight.shape[-1]
    for lag in range(min(width, x.shape[1])):
        out[:, lag:] += weight[:, 0, width - 1 - lag] * x[:, : x.shape[1] - lag]
    return out


def ssm(u, w, end, A_log, scan, flip):
    """Selection, discretization and scan of one direction, with the skip D; u (B, L, E)."""
    A = -torch.exp(w[A_log])
    rank = w[f'dt_proj{end}.weight'].shape[1]
    selected = u @ w[f'x_proj{end}.weight'].T
    dt, B, C = selected.split([rank, A.shape[1], A.shape[1]], dim=-1)
    delta = torch.log1p(torch.exp(dt @ w[f'dt_proj{end}.weight'].T + w[f'dt_proj{end}.bias']))
    sequences = u, delta, B, C
    if flip:
        sequences = [s.flip(1) for s in sequences]
    u_, delta, B, C = sequences
    y = scan(u_, delta, A, B, C)
    return (y.flip(1) if flip else y) + w[f'D{end}'] * u


def mixer(tokens, w, bimamba_type, scan=zoh_scan, halve=True):
    """tokens (B, L, C) through a mixer whose weights are w; v2 may halve the sum of directions."""
    x, z = (tokens @ w['in_proj.weight'].T).chunk(2, dim=-1)
    u = silu(short_conv(x, w['conv1d.weight'], w['conv1d.bias']))
    y = ssm(u, w, '', 'A_log', scan, flip=False)
    if bimamba_type == 'v1':
        y = y + ssm(u, w, '', 'A_b_log', scan, flip=True)
    if bimamba_type == 'v2':
        u = silu(short_conv(x.flip(1), w['conv1d_b.weight'], w['conv1d_b.bias'])).flip(1)
        y = y + ssm(u, w, '_b', 'A_b_log', scan, flip=True)
        y = y / 2 if halve else y
    return (y * silu(z)) @ w['out_proj.weight'].T


def rms_norm(x, weight):
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def under(prefix, w):
    return {k[len(prefix) :]: v for k, v in w.items() if k.startswith(prefix)}


def patch_tokens(image, weight, bias):
    """Non-overlapping patches in row-major order: (B, M, C)."""
    side = weight.shape[-1]
    rows = image.unfold(2, side, side).unfold(3, side, side)
    patches = rows.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
    return patches @ weight.flatten(1).T + bias


def turn(tokens, side, pretrained_side=14):
    """Rotary embedding over a square grid: channel pairs as complex numbers times e^(i angle).

    The first half of the pairs turns with the row, the second with the column.
    """
    pairs = torch.view_as_complex(tokens.unflatten(-1, (-1, 2)).clone())
    count = pairs.shape[-1] // 2
    for index in range(tokens.shape[1]):
        for k in range(count):
            frequency = 10000 ** (-k / count)
            for offset, position in ((0, index // side), (count, index % side)):
                angle = torch.tensor(position / side * pretrained_side * frequency)
                pairs[:, index, offset + k] *= torch.polar(torch.tensor(1.0), angle)
    return torch.view_as_real(pairs).flatten(-2)


def vim(image, w, bimamba_type, tap, depth, middle_cls=False, rope=False):
    """The tokens after each layer: the mixer's output, the stream, or the stream normalized.

    The stream is the one that the next layer takes, and of the last layer the sum that nothing
    turns.
    """
    tokens = patch_tokens(image, w['patch_embed.proj.weight'], w['patch_embed.proj.bias'])
    if middle_cls:
        middle = tokens.shape[1] // 2
        cls = w['cls_token'].expand(len(tokens), 1, -1)
        tokens = torch.cat([tokens[:, :middle], cls, tokens[:, middle:]], dim=1)
    stream = tokens + w['pos_embed']
    side = math.isqrt(tokens.shape[1])
    if rope:
        stream = turn(stream, side)
    taps = []
    for i in range(depth):
        normed = rms_norm(stream, w[f'layers.{i}.norm.weight'])
        mixed = mixer(normed, under(f'layers.{i}.mixer.', w), bimamba_type)
        after = stream + mixed
        stream = stream + turn(mixed, side) if rope else after
        norm = w.get('norm_f.weight' if i == depth - 1 else f'norm{i}.weight')
        outputs = {'mixer': mixed, 'residual': after if i == depth - 1 else stream}
        if norm is not None:
            outputs['norm'] = rms_norm(after, norm)
        taps.append(outputs.get(tap))
    return taps


def as_map(tokens):
    """(B, M, C) over a square grid to (B, C, H, W)."""
    side = math.isqrt(tokens.shape[1])
    return tokens.permute(0, 2, 1).reshape(len(tokens), -1, side, side)
