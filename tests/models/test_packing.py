"""Images of different sizes in common rows: each gives what it gives alone."""

import copy

import pytest
import torch

from tests.models.small import small_backbone
from vim_mm.models.packing import ALIGNMENT, Packing
from vim_mm.models.vision_mamba import OUT_TYPES
from vim_mm.timm_models.classifier import VisionMambaClassifier

SIZES = ((32, 32), (40, 24), (9, 70), (32, 32), (8, 8), (61, 37))
BOUNDS = {torch.float32: dict(rtol=1e-5, atol=2e-6), torch.float64: dict(rtol=1e-11, atol=1e-12)}
BACKBONES = {
    'plain': {},
    'middle': dict(cls_token='middle'),
    'double': dict(cls_token='double', out_feature='norm', out_indices=(0, 1)),
    'rope': dict(cls_token='middle', if_rope=True, out_feature='residual', out_indices=(0, 1)),
    'rope_residual': dict(if_rope=True, if_rope_residual=True, out_feature='norm'),
    'v1': dict(bimamba_type='v1', cls_token='head', if_abs_pos_embed=False),
    'none': dict(bimamba_type='none', cls_token='tail', stride=4),
    'recomputed': dict(with_cp=True, cls_token='middle', residual_in_fp32=False),
    'poly': dict(discretization_method='poly'),
}


def some_images(dtype=torch.float64):
    return [torch.randn(3, *size, dtype=dtype, requires_grad=True) for size in SIZES]


def results(model, images, outputs):
    """Outputs of each image, and gradients of the images and of all parameters that have one."""
    flat = [map_ for of_image in outputs for map_ in of_image]
    generator = torch.Generator().manual_seed(0)
    seeds = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in flat]
    leaves = [*images, *model.parameters()]
    grads = torch.autograd.grad(flat, leaves, seeds, allow_unused=True)
    return flat, [g for g in grads if g is not None]


@pytest.mark.parametrize('rows', [1, 3, 9])
@pytest.mark.parametrize('name', BACKBONES)
def test_each_image_gives_what_it_gives_alone(name, rows):
    model, images = small_backbone(**BACKBONES[name]).double(), some_images()
    packed = results(model, images, model.forward_packed(images, rows))
    alone = results(model, images, [model(image[None]) for image in images])
    torch.testing.assert_close(packed, alone, **BOUNDS[torch.float64])


@pytest.mark.parametrize('out_type', [t for t in OUT_TYPES if t != 'featmap'])
def test_every_output_in_float32(out_type):
    model = small_backbone(cls_token='middle', out_type=out_type)
    images = some_images(torch.float32)
    packed, _ = results(model, images, model.forward_packed(images))
    alone, _ = results(model, images, [model(image[None]) for image in images])
    torch.testing.assert_close(packed, alone, **BOUNDS[torch.float32])


def test_there_is_no_padding_between_images():
    """At the end of the row there is less than what kernels load at once."""
    model, images = small_backbone(cls_token='middle'), some_images(torch.float32)
    seen = []
    model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    model.forward_packed(images[:5])
    grids = [model.patch_embed.grid(size) for size in SIZES[:5]]
    tokens = sum(h * w + 1 for h, w in grids)
    assert tokens % ALIGNMENT and seen == [(1, tokens + -tokens % ALIGNMENT, 16)]


def test_stochastic_depth_is_drawn_for_each_image():
    """As for the images of a batch: some keep a layer, others do not."""
    model = small_backbone(drop_path_rate=0.5, out_feature='residual').double()
    images = [torch.randn(3, 32, 32).double() for _ in range(16)]
    torch.manual_seed(0)
    packed = [of_image[0] for of_image in model.forward_packed(images, rows=3)]
    torch.manual_seed(0)
    (batch,) = model(torch.stack(images))
    torch.testing.assert_close(torch.cat(packed), batch, rtol=1e-11, atol=1e-12)


def test_a_classifier_gives_logits():
    model = VisionMambaClassifier(
        img_size=32, patch_size=8, embed_dim=16, depth=2, num_classes=5, ssm_cfg=dict(d_state=4)
    ).double()
    images = some_images()
    for logits, image in zip(model.forward_packed(images, 2), images, strict=True):
        torch.testing.assert_close(logits, model(image[None]), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
def test_in_autocast(dtype):
    model, images = small_backbone(cls_token='middle'), some_images(dtype)
    with torch.autocast('cpu', torch.bfloat16), torch.no_grad():
        packed = model.forward_packed(images)
        alone = [model(image[None]) for image in images]
    for (a,), (b,) in zip(packed, alone, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0.1, atol=0.05)


@pytest.mark.slow
def test_compiled():
    model, images = small_backbone(cls_token='middle', if_rope=True), some_images(torch.float32)
    compiled = torch.compile(model.forward_packed, fullgraph=True, backend='aot_eager')
    torch.testing.assert_close(
        results(model, images, compiled(images)),
        results(model, images, model.forward_packed(images)),
        rtol=1e-3,
        atol=1e-3,
    )


@pytest.mark.parametrize('rows', [1, 2, 4, 7])
def test_rows_share_the_steps(rows):
    lengths = [7, 3, 9, 1, 4, 4]
    packing = Packing(lengths, rows)
    assert len(packing.rows) == min(rows, 6) and sum(packing.filled) == sum(lengths)
    assert max(packing.filled) <= max(9, 2 * sum(lengths) / rows)
    sequences = [torch.randn(n, 2) for n in lengths]
    packed = packing.pack(sequences)
    for found, expected in zip(packing.unpack(packed), sequences, strict=True):
        assert torch.equal(found[0], expected)
    starts = torch.zeros(packed.shape[:2], dtype=torch.bool)
    for row, start in packing.places:
        starts[row, start] = True
    reset = packing.reset()
    shorter = sum(filled < packed.shape[1] for filled in packing.filled)
    assert reset[starts].all() and (reset & ~starts).sum() == shorter


@pytest.mark.parametrize(
    'images, message',
    [
        pytest.param(torch.zeros(2, 3, 8, 8), 'images: expected a list', id='tensor'),
        pytest.param([], 'at least one image', id='none'),
        pytest.param(
            [torch.zeros(3, 8, 8), None], r'images\[1\]: expected a tensor', id='no-image'
        ),
        pytest.param([torch.zeros(1, 3, 8, 8)], r'images\[0\]: expected shape', id='batch'),
        pytest.param([torch.zeros(1, 8, 8)], r'in_channels = 3', id='channels'),
        pytest.param([torch.zeros(3, 8, 0)], 'at least one pixel', id='pixels'),
        pytest.param([torch.zeros(3, 8, 8).int()], r'numbers, got torch.int32$', id='int'),
        pytest.param(
            [torch.zeros(3, 8, 8), torch.zeros(3, 8, 8).double()], r'\[1\]: .*float64', id='dtypes'
        ),
        pytest.param(
            [torch.zeros(3, 8, 8), torch.zeros(3, 8, 8, device='meta')], r'\[1\]', id='devices'
        ),
    ],
)
def test_bad_images(images, message):
    with pytest.raises((TypeError, ValueError), match=message):
        small_backbone().forward_packed(images)


@pytest.mark.parametrize('rows, message', [(0, 'rows must be at least 1'), (1.5, 'an integer')])
def test_bad_rows(rows, message):
    with pytest.raises((TypeError, ValueError), match=message):
        small_backbone().forward_packed([torch.zeros(3, 8, 8)], rows)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('rows', [1, 3])
def test_on_cuda(rows):
    """The fused block and a CUDA graph of it, against each image alone in float64 on the CPU."""
    model = small_backbone(cls_token='middle', if_rope=True, out_feature='norm')
    images = some_images(torch.float32)
    wide = [image.detach().double() for image in images]
    expected = [copy.deepcopy(model).double()(image[None]) for image in wide]
    model, images = model.cuda(), [image.detach().cuda() for image in images]
    with torch.no_grad():
        packed = model.forward_packed(images, rows)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            again = model.forward_packed(images, rows)
        graph.replay()
    for (found,), (replayed,), (truth,) in zip(packed, again, expected, strict=True):
        torch.testing.assert_close(found.double().cpu(), truth, rtol=1e-4, atol=1e-4)
        assert torch.equal(found, replayed)
