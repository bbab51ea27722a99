"""Every form in which Vim's weights exist becomes a whole model of ours, or is refused by name."""

import copyreg
import pickle
import re
from collections import OrderedDict

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoints import released
from tests.models.small import small_backbone
from vim_mm import registered
from vim_mm.checkpoints import (
    ConversionError,
    NotACheckpointError,
    convert_checkpoint,
    fit,
    needs_conversion,
)
from vim_mm.checkpoints.converted_file import describe
from vim_mm.checkpoints.reading import load_from_local, read_as_data
from vim_mm.engine import UnsafeCheckpointError
from vim_mm.engine.converted_model import build_target

WIDTH, LAYERS, TOKENS = 16, 4, 17


def on_meta(shapes):
    return OrderedDict((k, torch.empty(v, device='meta')) for k, v in shapes.items())


def converted(checkpoint, **switches):
    conversion = convert_checkpoint(checkpoint, switches)
    return conversion, fit(conversion, build_target(conversion))


def small_classifier(**options):
    shapes = released.classifier_shapes(
        WIDTH, 10, depth=LAYERS, tokens=options.pop('tokens', TOKENS), **options
    )
    return released.random_weights(shapes)


@pytest.mark.parametrize('size', released.SIZES)
def test_the_released_classifiers_are_complete(size):
    """All names and shapes of the three sizes."""
    width, name = released.SIZES[size], released.MODEL_NAME.format(size)
    weights = on_meta(released.classifier_shapes(width))
    conversion, report = converted(released.as_classifier(weights, name))
    assert conversion.kind == 'classifier'
    assert report.complete and not report.resized
    assert report.mapped == report.targets == len(weights)
    assert {*report.dropped} == {
        'optimizer', 'lr_scheduler', 'epoch', 'model_ema', 'scaler', 'args'
    }  # fmt: skip
    told = conversion.switches.told
    assert told['arch'] == dict(embed_dims=width, num_layers=24)
    assert (told['cls_token'], told['if_divide_out'], told['if_rope']) == ('middle', True, False)


def test_the_finer_grid_of_the_plus_models_is_kept():
    name = 'vim_tiny_patch16_stride8_224_bimambav2_final_pool_mean_with_midclstok_div2'
    weights = on_meta(released.classifier_shapes(192, tokens=730))
    conversion, report = converted(released.as_classifier(weights, name))
    assert report.complete and not report.resized
    assert conversion.switches.told['stride'] == 8


@pytest.mark.parametrize('size', ['tiny', 'small'])
def test_the_released_segmentors_are_complete(size):
    weights = on_meta(released.segmentor_shapes(released.SIZES[size], tokens=1024))
    rope = released.rope_table(32, released.SIZES[size]) if size == 'small' else {}
    weights |= {f'backbone.{k}': v for k, v in rope.items()}
    conversion, report = converted(released.as_segmentor(weights))
    assert conversion.kind == 'segmentor'
    assert report.complete and not report.resized
    left_out = {'optimizer', 'backbone.norm_f.weight', *(f'backbone.{k}' for k in rope)}
    assert {*report.dropped} == left_out
    assert report.targets == report.mapped == len(weights) + 1 - len(left_out)
    switches = conversion.switches.all
    expected = dict(tiny=('mixer', True, False), small=('residual', False, True))[size]
    assert tuple(switches[k] for k in ('out_feature', 'if_divide_out', 'if_rope')) == expected
    assert switches['out_indices'] == (5, 11, 17, 23)
    assert conversion.meta['dataset_meta']['classes'] == ('wall', 'building')


def test_the_released_detector_is_complete():
    weights = on_meta(released.detector_shapes(192))
    weights |= {f'backbone.net.{k}': v for k, v in released.rope_table(64, 192).items()}
    conversion, report = converted(released.as_detector(weights))
    assert conversion.kind == 'detector'
    assert report.complete
    mask_head = sum('mask_head' in name for name in weights)
    assert report.mapped == len(weights) - 2
    assert report.targets == report.mapped + 2 * mask_head  # one of them becomes three
    assert conversion.switches.told['rope_grid'] == 14
    switches = conversion.switches.all
    assert switches['if_rope_residual'] and not switches['if_divide_out']
    assert switches['out_feature'] == 'residual'


def test_mask_rcnn_of_detectron2_is_complete():
    shapes = released.detector_shapes(WIDTH, 3, 8, 12, stages=0, depth=LAYERS, tokens=16)
    weights = released.random_weights(shapes)
    conversion, report = converted(released.as_detector(weights))
    assert report.complete and report.mapped == report.targets == len(weights)
    new = conversion.state_dict['roi_head.mask_head.convs.3.ln.weight']
    assert torch.equal(new, weights['roi_heads.mask_head.mask_fcn4.norm.weight'])


@pytest.mark.parametrize('grid', [14, 7])
def test_the_rotary_table_tells_its_scale(grid):
    weights = small_classifier(cls=False, tokens=16) | released.rope_table(4, WIDTH, grid)
    assert convert_checkpoint(weights).switches.told['rope_grid'] == grid


def test_another_rotary_table_is_refused():
    weights = small_classifier(cls=False, tokens=16) | released.rope_table(4, WIDTH)
    weights['rope.freqs_cos'] = weights['rope.freqs_cos'].roll(1, 0)
    with pytest.raises(ConversionError, match='its rotary table is not that of Vim'):
        convert_checkpoint(weights)


def test_a_config_in_the_file_is_read_as_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shapes = released.segmentor_shapes(WIDTH, 5, 6, depth=LAYERS, tokens=16)
    weights = released.random_weights(shapes) | {
        f'backbone.{k}': v for k, v in released.rope_table(4, WIDTH).items()
    }
    checkpoint = released.as_segmentor(weights, released.SMALL_SEGMENTOR_CONFIG)
    told = convert_checkpoint(checkpoint).switches.told
    assert told['out_indices'] == (5, 11, 17, 23)
    assert (told['out_feature'], told['if_divide_out']) == ('residual', False)
    assert told['if_rope_residual'] and told['residual_in_fp32']
    assert not (tmp_path / 'executed').exists()


@pytest.mark.parametrize('method', ['foh', 'bilinear', 'poly', 'highorder', 'rk4'])
def test_a_file_of_the_six_method_code_tells_its_method(method):
    name = f'vim_tiny_patch16_224_bimambav2_{method}'
    conversion = convert_checkpoint(released.as_classifier(small_classifier(), name))
    told = conversion.switches.told
    assert (told['discretization_method'], told['cls_token']) == (method, 'middle')
    note = conversion.state_dict._metadata['backbone']
    assert note['discretization_method'] == method


def test_what_is_said_by_hand_has_the_last_word():
    switches = dict(if_divide_out=True, discretization_method='foh')
    weights = released.random_weights(
        released.detector_shapes(WIDTH, 3, 8, 12, depth=LAYERS, tokens=16)
    )
    note = convert_checkpoint(weights, switches).state_dict._metadata['backbone']
    assert (note['if_divide_out'], note['discretization_method']) == (True, 'foh')


def test_our_own_old_files_stay_what_they_are(tmp_path):
    """Without a note, with DataParallel's prefix, of a whole model or bare."""
    model = small_backbone(cls_token='middle', out_feature='norm', ssm_cfg=dict(d_state=16))
    bare = OrderedDict(model.state_dict())
    whole = {f'module.backbone.{k}': v for k, v in bare.items()}
    for checkpoint in (bare, dict(state_dict=bare), dict(state_dict=whole, meta={})):
        conversion, report = converted(checkpoint, cls_token='middle')
        assert report.mapped == report.targets == len(bare)
        assert all(torch.equal(conversion.state_dict[f'backbone.{k}'], v) for k, v in bare.items())
        assert not needs_conversion(checkpoint)


def test_notes_of_our_own_files_are_kept():
    model = small_backbone(if_divide_out=False, img_size=(16, 64), discretization_method='rk4')
    conversion = convert_checkpoint(dict(state_dict=model.state_dict()))
    note = conversion.state_dict._metadata['backbone']
    assert (note['grid'], note['discretization_method']) == ((2, 8), 'rk4')
    assert note['if_divide_out'] is False and not conversion.switches.assumed


@pytest.mark.parametrize('bias', [False, True])
def test_layer_scales_become_part_of_the_projection(bias, tmp_path):
    """As a Vim that multiplies each mixer's output by its scale computes."""
    model = small_backbone(ssm_cfg=dict(bias=bias)).eval()
    weights = {k: torch.randn_like(v) * 0.1 + v for k, v in model.state_dict().items()}
    model.load_state_dict(weights)
    scales = [torch.randn(WIDTH) for _ in model.layers]
    for layer, scale in zip(model.layers, scales):
        layer.mixer.register_forward_hook(lambda _, __, out, scale=scale: out * scale)
    x = torch.randn(1, 3, 64, 64)
    expected = model(x)
    scaled = weights | {f'layers.{i}.mixer.gamma': scale for i, scale in enumerate(scales)}
    conversion = convert_checkpoint(dict(model=scaled))
    assert 'layers.1.mixer.gamma' in conversion.dropped and not conversion.unknown
    loaded = small_backbone(ssm_cfg=dict(bias=bias)).eval()
    converted = {k.removeprefix('backbone.'): v for k, v in conversion.state_dict.items()}
    loaded.load_state_dict(converted)
    for got, want in zip(loaded(x), expected):
        torch.testing.assert_close(got, want)
    torch.save(scaled, tmp_path / 'bare.pth')
    init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'bare.pth'))
    started = small_backbone(registered.VisionMamba, ssm_cfg=dict(bias=bias), init_cfg=init_cfg)
    started.init_weights()
    torch.testing.assert_close(
        started.layers[0].mixer.out_proj.weight, loaded.layers[0].mixer.out_proj.weight
    )


OTHERS = {
    'FastVim, which pools': {'layers.0.mixer.layernorm.weight': (2 * WIDTH,)},
    'VMamba, which scans': {'layers.0.blocks.0.op.x_proj_weight': (4, 3, 8)},
    'a Vim with LayerNorm': {'layers.0.norm.bias': (WIDTH,)},
    'Mamba-2': {'layers.0.mixer.dt_bias': (4,)},
    'a language model': {'embedding.weight': (9, WIDTH)},
    'a transformer': {'blocks.0.attn.qkv.weight': (8, 8)},
    'a ResNet': {'layer1.0.conv1.weight': (8, 8, 1, 1)},
}


@pytest.mark.parametrize('what', OTHERS)
def test_another_architecture_is_refused_by_its_name(what, tmp_path):
    weights = released.random_weights(OTHERS[what])
    if 'layers.0.blocks' not in next(iter(weights)):
        weights |= small_classifier()
    with pytest.raises(ConversionError, match=f'it is of another architecture than Vim: {what}'):
        convert_checkpoint(dict(model=weights))
    torch.save(dict(model=weights), tmp_path / 'other.pth')
    init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'other.pth'), prefix='model.')
    model = small_backbone(registered.VisionMamba, init_cfg=init_cfg)
    with pytest.raises(RuntimeError, match=f'other.pth: .*architecture than Vim: {what}'):
        model.init_weights()


@pytest.mark.parametrize(
    ('checkpoint', 'message'),
    [
        (dict(epoch=1), r"there are no weights in it: it holds \['epoch'\]"),
        ([1], 'there are no weights in it: it holds list'),
        (dict(model={'fc.weight': torch.zeros(2)}), r'no weights of a Vim \(.* fc.weight\)'),
        (
            {f'{k}.layers.0.mixer.A_log': torch.zeros(1) for k in 'ab'},
            r"several Vims, under \['a\.",
        ),
        ({'layers.0.mixer.A_log': torch.zeros(1)}, 'it lacks patch_embed.proj.weight'),
    ],
)
def test_files_without_weights_of_one_vim(checkpoint, message):
    with pytest.raises(ConversionError, match=message):
        convert_checkpoint(checkpoint)


def test_a_score_beside_the_weights_does_not_hide_them():
    weights = small_segmentor()
    expected = convert_checkpoint({'state_dict': weights}).state_dict
    found = convert_checkpoint(
        {'state_dict': weights, 'max_accuracy': torch.tensor(80.0)}
    ).state_dict
    assert found.keys() == expected.keys()


def small_segmentor():
    shapes = released.segmentor_shapes(WIDTH, 5, 6, depth=1, tokens=16)
    weights = released.random_weights(shapes)
    return weights | {f'backbone.{k}': v for k, v in released.rope_table(4, WIDTH).items()}


def small_detector():
    return released.random_weights(released.detector_shapes(WIDTH, 3, 8, 12, depth=1, tokens=16))


ODD = {
    'missing': lambda name, weight: {},
    'flat': lambda name, weight: {name: weight.flatten()},
    'empty': lambda name, weight: {name: weight[:0]},
    'prefixed': lambda name, weight: {f'student.{name}': weight},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ('whole', 'changes'),
    [
        pytest.param(small_classifier, [*ODD], id='classifier'),
        pytest.param(small_segmentor, ['missing', 'flat'], id='segmentor', marks=pytest.mark.slow),
        pytest.param(small_detector, ['missing', 'flat'], id='detector', marks=pytest.mark.slow),
    ],
)
def test_whatever_weight_is_missing_or_odd_is_named(whole, changes):
    """By an error of the converter, or in the report; never by another error."""
    weights = whole()
    words = ['no weights of a Vim', 'it lacks student.', '--config']
    for name, weight in weights.items():
        if weight.dim() < 2 or re.search(r'layers\.[1-9]|rope', name):
            continue
        # Without a class token, its entry in pos_embed is one of a patch.
        named = 'for 17 patches' if name == 'cls_token' else name.rpartition('.')[2]
        for what in changes:
            others = {k: v for k, v in weights.items() if k != name}
            try:
                _, report = converted(others | ODD[what](name, weight))
            except ConversionError as error:
                assert any(word in str(error) for word in (*words, named)), (what, name)
                continue
            optional = name.endswith(('pos_embed', 'A_b_log'))
            assert optional or not report.complete, (what, name)


@pytest.mark.parametrize(
    ('name', 'weight', 'message'),
    [
        ('layers.0.mixer.conv1d.weight', None, r'it lacks layers\.0\.mixer\.conv1d\.weight'),
        ('layers.0.mixer.dt_proj.weight', None, r'it lacks layers\.0\.mixer\.dt_proj\.weight'),
        ('head.weight', None, r'it lacks head\.fc\.weight'),
        ('patch_embed.proj.weight', (WIDTH, 768), r'its patch_embed.* shape \(16, 768\), where'),
        ('pos_embed', (1, 1, WIDTH), 'its pos_embed has no entry for a patch'),
        ('pos_embed', (TOKENS, WIDTH), r'its pos_embed has the shape \(17, 16\), where'),
    ],
)
def test_weights_that_tell_the_sizes(name, weight, message, tmp_path):
    weights = small_classifier()
    del weights[name]
    if weight is not None:
        weights[name] = torch.zeros(weight)
    checkpoint = released.as_classifier(weights)
    with pytest.raises(ConversionError, match=message):
        converted(checkpoint)
    torch.save(checkpoint, tmp_path / 'odd.pth')
    init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'odd.pth'))
    arch = dict(embed_dims=WIDTH, num_layers=LAYERS)
    model = registered.VisionMamba(arch, img_size=64, init_cfg=init_cfg)
    if name.startswith('head'):  # of which the backbone has no need
        model.init_weights()
        return
    with pytest.raises(ConversionError, match=rf'odd\.pth.*{message}'):
        model.init_weights()


@pytest.mark.parametrize('text', ['out_indices=5', 'stride=0', f'stride=0x{"f" * 9000}'])
def test_a_config_that_no_vim_has(text):
    config = f"model = dict(backbone=dict(type='VisionMambaSeg', {text}))"
    checkpoint = released.as_segmentor(small_segmentor(), config)
    with pytest.raises(ConversionError, match=f'it tells {text.partition("=")[0]} = .*no Vim'):
        convert_checkpoint(checkpoint)


def test_what_tells_no_argument_is_left_out():
    checkpoint = released.as_classifier(small_classifier())
    vars(checkpoint['args'])['discretization_method'] = ['foh']
    checkpoint['meta'] = dict(config='model = {[1]: 2}')
    assert convert_checkpoint(checkpoint).switches.all['discretization_method'] == 'zoh'


@pytest.mark.parametrize(
    ('name', 'size', 'message'),
    [
        ('layers.999999999.norm.weight', WIDTH, r'it has 5 layers, .* none is layers\.4'),
        ('layers.0.mixer.gamma', 5, r'its layers\.0\.mixer\.gamma has 5 entries for 16 channels'),
    ],
)
def test_one_weight_that_does_not_fit_the_others(name, size, message):
    with pytest.raises(ConversionError, match=message):
        convert_checkpoint(dict(model=small_classifier() | {name: torch.ones(size)}))


@pytest.mark.parametrize('name', ['model_ema', 'state_dict_ema'])
def test_an_average_is_not_taken(name):
    with pytest.raises(ConversionError, match=rf"average '{name}', which is not taken: the"):
        convert_checkpoint({name: small_classifier(), 'epoch': 3})


@pytest.mark.parametrize('value', [float('nan'), float('inf')])
def test_weights_of_a_failed_training_are_refused(value):
    weights = small_classifier()
    for name in ('layers.1.mixer.D', 'layers.2.mixer.D'):
        weights[name][3] = value
    with pytest.raises(ConversionError, match=r'layers\.1\.mixer\.D has values that are NaN'):
        convert_checkpoint(weights)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_half_precision_is_reported(dtype):
    weights = small_classifier()
    weights['layers.0.mixer.in_proj.weight'] = weights['layers.0.mixer.in_proj.weight'].to(dtype)
    conversion, report = converted(weights)
    assert report.complete
    lines = report.lines()
    first = lines.index('in half precision: 1')
    assert lines[first + 1].strip() == 'backbone.layers.0.mixer.in_proj.weight'
    assert '1 of its weights are in half precision.' in describe(conversion)


@pytest.mark.parametrize(
    'checkpoint',
    [
        lambda weights: released.as_classifier(weights, 'fastvim_tiny_patch16'),
        lambda weights: dict(state_dict=weights, meta=dict(cfg="backbone = dict(type='FastVim')")),
        lambda weights: dict(state_dict=weights, meta=dict(config="dict(type='FastVim')")),
    ],
)
def test_fastvim_is_recognized_by_what_it_says(checkpoint):
    """Without its norm it has Vim's names and shapes."""
    with pytest.raises(ConversionError, match='FastVim, which pools tokens'):
        convert_checkpoint(checkpoint(small_classifier()))


def test_a_folder_of_that_name_makes_no_fastvim():
    meta = dict(config="work_dir = 'vim_vs_fastvim'\nmodel = dict(type='Vim')")
    convert_checkpoint(dict(state_dict=small_classifier(), meta=meta))


@pytest.mark.parametrize('protocol', [2, 4, 5])
def test_a_pickle_of_arrays_is_read(protocol, tmp_path):
    shapes = released.detector_shapes(WIDTH, 3, 8, 12, depth=LAYERS, tokens=16)
    weights = {k: v.numpy() for k, v in released.random_weights(shapes).items()}
    file = tmp_path / 'detector.pkl'
    file.write_bytes(pickle.dumps({'model': weights, '__author__': 'vim'}, protocol=protocol))
    _, report = converted(read_as_data(file))
    assert report.complete
    loaded = load_from_local(str(file))['state_dict']
    name = 'roi_head.bbox_head.2.shared_convs.1.conv.weight'
    assert np.array_equal(loaded[name], weights['roi_heads.box_head.2.conv2.weight'])


class Reduced:
    """Pickles as whatever is given, such as a call, or a call and the state of what it returns."""

    def __init__(self, *reduced):
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced


class Made(Reduced):
    """Pickles as an object that the opcode NEWOBJ makes."""

    __class__ = np.ndarray

    def __init__(self, *arguments):
        super().__init__(copyreg.__newobj__, (np.ndarray, *arguments))


def write_pickle(content, file):
    file.write_bytes(pickle.dumps(content, protocol=4))


POINTER = b'A' * 8  # an address, where an array is of objects
# A dtype of floats that says of itself that it holds objects.
LAYOUT = Reduced(np.dtype, ('f8', False, True), (3, '<', None, None, None, -1, -1, 63))
RECONSTRUCT, SCALAR = np.empty(0).__reduce__()[0], np.int64().__reduce__()[0]
CRAFTED = {
    'exec': Reduced(exec, ("open('victim', 'w')",)),
    'load': Reduced(np.load, ('victim',)),
    'dtype of objects': Reduced(np.dtype, ('O',)),
    'dtype of records': Reduced(np.dtype, ('f4,O',)),
    'layout': LAYOUT,
    'ndarray called': Reduced(np.ndarray, ((1,), 'O', POINTER)),
    'ndarray called for floats': Reduced(np.ndarray, ((1,), 'f8', POINTER)),
    'ndarray made': Made((1,), 'O', POINTER),
    'array of objects': np.array([{}, 'text'], dtype=object),
    'array of a layout': Reduced(
        RECONSTRUCT, (np.ndarray, (0,), b'b'), (1, (1,), LAYOUT, False, POINTER)
    ),
    'array larger than its data': Reduced(
        RECONSTRUCT, (np.ndarray, (0,), b'b'), (1, (9,), np.dtype('f8'), False, POINTER)
    ),
    'scalar of objects': Reduced(SCALAR, (np.dtype('O'), POINTER)),
}


@pytest.mark.parametrize('write', [write_pickle, torch.save], ids=['pkl', 'pth'])
@pytest.mark.parametrize('what', CRAFTED)
def test_a_pickle_of_anything_else_is_refused(what, write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(dict(model=CRAFTED[what]), tmp_path / 'evil')
    with pytest.raises(UnsafeCheckpointError, match='evil was not loaded'):
        read_as_data(tmp_path / 'evil')
    assert not (tmp_path / 'victim').exists()


@pytest.mark.parametrize('write', [write_pickle, torch.save], ids=['pkl', 'pth'])
def test_arrays_of_numbers_are_read_whole(write, tmp_path):
    """Of every dtype, byte order and shape; written again they are plain."""
    arrays = [np.arange(6).astype(code) for code in '?bBhHiIlLqQefdgFDG']
    arrays += [np.arange(6, dtype='>f4'), np.zeros((0, 3)), np.array(2.5)]
    arrays += [np.arange(24.0).reshape(2, 3, 4, order=order) for order in 'CF']
    arrays += [np.arange(24)[::2], np.float32(0.1), np.bool_(True), np.complex64(1j)]
    write(dict(arrays=arrays), tmp_path / 'arrays')
    read = read_as_data(tmp_path / 'arrays')['arrays']
    for before, after in zip(arrays, read, strict=True):
        assert isinstance(after, type(before))
        assert (after.dtype, after.shape) == (before.dtype.newbyteorder('='), before.shape)
        assert np.array_equal(before, after)
    assert read[-5].flags.f_contiguous
    torch.save(read, tmp_path / 'again.pth')
    assert type(torch.load(tmp_path / 'again.pth', weights_only=False)[0]) is np.ndarray


def test_a_damaged_pickle_is_refused(tmp_path):
    whole = pickle.dumps(dict(model=dict(a=np.zeros(99))), protocol=4)
    (tmp_path / 'half.pkl').write_bytes(whole[: len(whole) // 2])
    with pytest.raises(NotACheckpointError, match=r'half\.pkl is a damaged checkpoint'):
        read_as_data(tmp_path / 'half.pkl')


def test_safetensors_are_read(tmp_path):
    weights = small_classifier()
    save_file(weights, tmp_path / 'vim.safetensors')
    conversion, report = converted(read_as_data(tmp_path / 'vim.safetensors'))
    assert report.complete and report.mapped == len(weights)
    assert 'discretization_method' in conversion.switches.assumed
