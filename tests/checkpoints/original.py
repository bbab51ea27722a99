"""The forward pass of hustvl/Vim's three models, in plain PyTorch, from what its code computes.

Independent of vim_mm.models: it shares the paper's equations with tests/models/vim_equations.py.
The stream is kept as the original keeps it: each layer gets the output of the layer before and the
residual without it. What is rotated, dropped and returned, and where, is hustvl/Vim's
(vim/models_mamba.py, seg/backbone/vim.py, det/detectron2/modeling/backbone/vim.py).
"""

import torch

from tests.models import vim_equations
from tests.models.vim_equations import as_map, patch_tokens, rms_norm, under


def rotate(tokens, w):
    """Channel pairs times the unit numbers of the table; the first token of an odd number rests."""
    cos, sin = w['rope.freqs_cos'].to(tokens.dtype), w['rope.freqs_sin'].to(tokens.dtype)
    if tokens.shape[1] % 2:
        return torch.cat([tokens[:, :1], rotate(tokens[:, 1:], w)], dim=1)
    first, second = tokens[..., ::2], tokens[..., 1::2]
    quarter = torch.stack([-second, first], dim=-1).flatten(-2)
    return tokens * cos + quarter * sin


class Run:
    """One pass through the layers, after each of which ``residual`` and ``hidden`` can be read.

    Args:
        w (dict): Weights and rotary tables by their names in the original.
        divide (bool): ``if_divide_out``.
        rope (str): '', 'hidden' or 'residual', for ``if_rope`` and ``if_rope_residual``.
        kept (Tensor, optional): (depth, batch), what stochastic depth multiplies each sample's
            output of each layer by.
    """

    def __init__(self, w, depth, divide=True, rope='', kept=None):
        self.w, self.depth, self.divide, self.rope, self.kept = w, depth, divide, rope, kept
        self.hidden = self.residual = None

    def dropped(self, i):
        """The output of layer i, after stochastic depth."""
        return self.hidden if self.kept is None else self.hidden * self.kept[i][:, None, None]

    def layers(self, tokens):
        """Yield the number of each layer after it ran."""
        self.hidden = tokens
        for i in range(self.depth):
            if self.rope:
                self.hidden = rotate(self.hidden, self.w)
                if self.residual is not None and self.rope == 'residual':
                    self.residual = rotate(self.residual, self.w)
            stream = self.hidden if self.residual is None else self.residual + self.dropped(i - 1)
            self.residual = stream
            normed = rms_norm(stream, self.w[f'layers.{i}.norm.weight'])
            mixer = under(f'layers.{i}.mixer.', self.w)
            self.hidden = vim_equations.mixer(normed, mixer, 'v2', halve=self.divide)
            yield i


def embed(images, w):
    tokens = patch_tokens(images, w['patch_embed.proj.weight'], w['patch_embed.proj.bias'])
    if 'cls_token' not in w:
        return tokens + w['pos_embed']
    half = tokens.shape[1] // 2
    cls = w['cls_token'].expand(len(tokens), 1, -1)
    return torch.cat([tokens[:, :half], cls, tokens[:, half:]], dim=1) + w['pos_embed']


def classify(images, w, depth, kept=None):
    """Features of the class token in the middle, and the logits of the head."""
    run = Run(w, depth, kept=kept)
    tokens = embed(images, w)
    for _ in run.layers(tokens):
        pass
    features = rms_norm(run.residual + run.dropped(depth - 1), w['norm_f.weight'])
    features = features[:, (tokens.shape[1] - 1) // 2]
    return features, features @ w['head.weight'].T + w['head.bias']


def taps_of_segmentation(images, w, depth, out_indices, residual, divide, rope, kept=None):
    """Maps of one resolution, before the pyramid.

    Without ``residual`` the outputs of the layers; with it the stream as the layer after each of
    them has it, and at the end the sum.
    """
    run = Run(w, depth, divide, rope, kept)
    taps = []
    for i in run.layers(embed(images, w)):
        if residual and i - 1 in out_indices:
            taps.append(run.residual)
        if not residual and i in out_indices:
            taps.append(run.hidden)
    if residual and out_indices[-1] == depth - 1:
        taps.append(run.hidden + run.residual)
    return [as_map(tap) for tap in taps]


def tap_of_detection(images, w, depth, divide, rope, kept=None):
    """The one map, which has the last layer's output whole."""
    run = Run(w, depth, divide, rope, kept)
    for _ in run.layers(embed(images, w)):
        pass
    return as_map(run.hidden + run.residual)
