import copy
import gc
from collections import OrderedDict

import pytest
import torch
from mmengine.model import BaseModel
from mmengine.runner import load_checkpoint, save_checkpoint

from tests.models.small import small_backbone
from vim_mm import registered
from vim_mm.models.tokens import resize_pos_embed


def pretrained(path, **kwargs):
    init_cfg = dict(type='Pretrained', checkpoint=str(path))
    model = small_backbone(registered.VisionMamba, **kwargs, init_cfg=init_cfg)
    model.init_weights()
    return model


def save(model, path, note=True):
    """What MMEngine writes; without the note, what other people's code writes."""
    state_dict = model.state_dict()
    if not note:
        state_dict = OrderedDict(state_dict)
    assert hasattr(state_dict, '_metadata') == note
    torch.save(dict(state_dict=state_dict), path)
    return path


def assert_same_weights(model, other, but=()):
    weights = other.state_dict()
    assert model.state_dict().keys() - set(but) <= weights.keys()
    for name, value in model.state_dict().items():
        if name not in but:
            assert torch.equal(value, weights[name]), name


def test_pretrained_round_trip(tmp_path):
    model = small_backbone(cls_token='middle', out_feature='norm')
    save_checkpoint(dict(state_dict=model.state_dict()), str(tmp_path / 'model.pth'))
    loaded = pretrained(tmp_path / 'model.pth', cls_token='middle', out_feature='norm')
    assert_same_weights(loaded, model)
    x = torch.randn(1, 3, 40, 32)
    assert torch.equal(loaded(x)[0], model(x)[0])


def test_pretrained_from_a_part_of_a_whole_model(tmp_path):
    class Segmentor(BaseModel):
        def __init__(self, backbone):
            super().__init__()
            self.backbone = backbone

        def forward(self, inputs):
            return self.backbone(inputs)

    model = Segmentor(small_backbone())
    save(model, tmp_path / 'segmentor.pth')
    init_cfg = dict(
        type='Pretrained', checkpoint=str(tmp_path / 'segmentor.pth'), prefix='backbone.'
    )
    loaded = small_backbone(registered.VisionMamba, init_cfg=init_cfg)
    loaded.init_weights()
    assert_same_weights(loaded, model.backbone)

    whole = Segmentor(small_backbone(img_size=48))
    load_checkpoint(whole, str(tmp_path / 'segmentor.pth'))
    resized = resize_pos_embed(model.backbone.pos_embed, (4, 4), (6, 6))
    assert torch.equal(whole.backbone.pos_embed, resized)


def test_second_init_weights_does_not_undo_pretraining(tmp_path):
    model = small_backbone()
    loaded = pretrained(save(model, tmp_path / 'model.pth'))
    loaded.init_weights()
    assert_same_weights(loaded, model)


@pytest.mark.parametrize('note', [False, True])
@pytest.mark.parametrize('cls_token', ['none', 'head', 'middle', 'tail', 'double'])
def test_another_grid_is_resized_and_class_tokens_are_kept(tmp_path, cls_token, note):
    model = small_backbone(cls_token=cls_token)
    path = save(model, tmp_path / 'model.pth', note)
    loaded = pretrained(path, cls_token=cls_token, img_size=(40, 24))
    assert_same_weights(loaded, model, but=['pos_embed'])
    expected = resize_pos_embed(model.pos_embed, (4, 4), (5, 3), cls_token)
    assert torch.equal(loaded.pos_embed, expected)


@pytest.mark.parametrize('img_size', [224, 512])
def test_middle_class_token_of_vims_checkpoints_is_taken_out_first(tmp_path, img_size):
    released = small_backbone(img_size=224, patch_size=16, cls_token='middle', out_feature='norm')
    assert released.pos_embed.shape[1] == 197
    with torch.no_grad():
        released.pos_embed[:, 98] = 1e6
    path = save(released, tmp_path / 'vim.pth', note=False)
    loaded = pretrained(path, img_size=img_size, patch_size=16)
    assert loaded.pos_embed.abs().max() < 10
    patches = torch.cat([released.pos_embed[:, :98], released.pos_embed[:, 99:]], dim=1)
    grid = (img_size // 16, img_size // 16)
    assert torch.equal(loaded.pos_embed, resize_pos_embed(patches, (14, 14), grid))


def test_a_noted_class_token_is_taken_out_where_it_stands(tmp_path):
    model = small_backbone(cls_token='tail')
    loaded = pretrained(save(model, tmp_path / 'model.pth'))
    assert torch.equal(loaded.pos_embed, model.pos_embed[:, :-1])


def test_a_noted_class_token_moves_with_its_position(tmp_path):
    model = small_backbone(cls_token='head')
    loaded = pretrained(save(model, tmp_path / 'model.pth'), cls_token='tail')
    expected = torch.cat([model.pos_embed[:, 1:], model.pos_embed[:, :1]], dim=1)
    assert torch.equal(loaded.pos_embed, expected)


def test_a_noted_non_square_grid_is_resized(tmp_path):
    model = small_backbone(img_size=(16, 64))
    for img_size, grid in ((32, (4, 4)), ((24, 40), (3, 5))):
        loaded = pretrained(save(model, tmp_path / 'model.pth'), img_size=img_size)
        assert torch.equal(loaded.pos_embed, resize_pos_embed(model.pos_embed, (2, 8), grid))


def test_the_note_survives_loading_without_pickled_code(tmp_path):
    model = small_backbone(img_size=(16, 64), cls_token='head')
    save(model, tmp_path / 'model.pth')
    state_dict = torch.load(tmp_path / 'model.pth', weights_only=True)['state_dict']
    note = state_dict._metadata['']
    assert (note['grid'], note['cls_token']) == ((2, 8), 'head')


def test_unknown_non_square_grid(tmp_path):
    path = save(small_backbone(img_size=(16, 40)), tmp_path / 'model.pth', note=False)
    with pytest.raises(ValueError, match=r'pos_embed .* 10 patches: not the 4x4'):
        pretrained(path)


@pytest.mark.parametrize(
    'spoil, message',
    [
        pytest.param(
            lambda w: w.pop('layers.0.mixer.A_b_log'),
            r'lacks 1 of 37 .*VisionMamba: layers\.0\.mixer\.A_b_log$',
            id='missing',
        ),
        pytest.param(lambda w: w.pop('pos_embed'), 'lacks 1 .* pos_embed$', id='pos_embed'),
        pytest.param(
            lambda w: w.update({'layers.0.mixer.D': torch.zeros(3)}),
            r'wrong shape of 1 .*D \(3,\) for \(32,\)$',
            id='shape',
        ),
    ],
)
def test_incomplete_weights_raise(tmp_path, spoil, message):
    weights = OrderedDict(small_backbone().state_dict())
    spoil(weights)
    torch.save(dict(state_dict=weights), tmp_path / 'model.pth')
    with pytest.raises(RuntimeError, match=message):
        pretrained(tmp_path / 'model.pth')


@pytest.mark.parametrize('prefix', [None, 'model', 'model.', 'backbone.'])
def test_the_backbone_is_found_under_whatever_prefix(tmp_path, prefix):
    """And with it the note of what its weights compute."""
    model = small_backbone(out_feature='residual')
    weights = OrderedDict((f'model.{k}', v) for k, v in model.state_dict().items())
    weights._metadata = OrderedDict(model=model.state_dict()._metadata[''])
    torch.save(dict(state_dict=weights), tmp_path / 'model.pth')
    init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'model.pth'), prefix=prefix)
    loaded = small_backbone(registered.VisionMamba, init_cfg=init_cfg)
    loaded.init_weights()
    assert_same_weights(loaded, model)
    assert loaded.loaded_switches['out_feature'] == 'residual'


def test_of_several_backbones_the_prefix_names_one(tmp_path):
    student, teacher = small_backbone(), small_backbone()
    weights = {f'{name}.{k}': v for name, m in (('student', student), ('teacher', teacher))
               for k, v in m.state_dict().items()}  # fmt: skip
    torch.save(weights, tmp_path / 'model.pth')
    init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'model.pth'), prefix='teacher')
    loaded = small_backbone(registered.VisionMamba, init_cfg=init_cfg)
    loaded.init_weights()
    assert_same_weights(loaded, teacher)
    with pytest.raises(ValueError, match=r"prefix must be one of \['student', 'teacher'\]"):
        pretrained(tmp_path / 'model.pth')


def test_weights_under_another_name_are_pointed_at():
    weights = {f'backbone.{k}': v for k, v in small_backbone().state_dict().items()}
    with pytest.raises(RuntimeError, match=r"lacks 37 of 37 .* \(they stand under 'backbone\.'\)"):
        small_backbone().load_state_dict(weights)


def test_v1_weights_do_not_fit_v2(tmp_path):
    path = save(small_backbone(bimamba_type='v1'), tmp_path / 'model.pth')
    with pytest.raises(RuntimeError, match=r'lacks .*conv1d_b'):
        pretrained(path)


@pytest.mark.parametrize('bimamba_type', ['none', 'v1'])
def test_v2_weights_do_not_fit_fewer_directions(tmp_path, bimamba_type):
    weights = OrderedDict(small_backbone(bimamba_type='v2').state_dict())
    weights |= small_backbone(bimamba_type=bimamba_type).state_dict()
    torch.save(dict(state_dict=weights), tmp_path / 'model.pth')
    with pytest.raises(RuntimeError, match=r'weights beyond .*(conv1d_b|A_b_log|D_b)'):
        pretrained(tmp_path / 'model.pth', bimamba_type=bimamba_type)


def test_norms_of_new_taps_may_be_missing_but_not_the_final_one(tmp_path):
    model = small_backbone(out_feature='norm')
    path = save(model, tmp_path / 'model.pth')
    config = dict(out_feature='norm', out_indices=(0, 1))
    loaded = pretrained(path, **config)
    assert_same_weights(loaded, model, but=['norm0.weight'])
    assert (loaded.norm0.weight == 1).all()

    path = save(small_backbone(out_feature='mixer'), tmp_path / 'model.pth')
    with pytest.raises(RuntimeError, match=r'lacks 1 .*norm_f.weight'):
        pretrained(path, **config)


def test_unneeded_weights_are_ignored(tmp_path):
    model = small_backbone(cls_token='middle', out_feature='norm')
    weights = OrderedDict(model.state_dict(), **{'head.weight': torch.zeros(2, 16)})
    torch.save(dict(model=weights, state_dict=weights), tmp_path / 'model.pth')
    loaded = pretrained(tmp_path / 'model.pth', out_indices=0)
    assert_same_weights(loaded, model, but=['pos_embed'])
    assert len(loaded.layers) == 1


def test_a_deep_copy_outlives_its_original():
    """As in MMEngine's exponential moving average."""
    model = small_backbone()
    twin = copy.deepcopy(model)
    weights = small_backbone(img_size=48).state_dict()
    del model
    gc.collect()
    twin.load_state_dict(weights)
    assert twin.pos_embed.shape == (1, 16, 16)


@pytest.mark.parametrize('prefix', ['encoder.', 'backbone.', 'backbone', None])
def test_a_prefix_that_the_file_lacks_is_told(tmp_path, prefix):
    model = small_backbone()
    weights = {f'backbone.{k}': v for k, v in model.state_dict().items()}
    said = []
    torch.save(dict(state_dict=weights), tmp_path / 'model.pth')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            'vim_mm.checkpoints.pretrained.print_log',
            lambda text, *_, **__: said.append(text),
        )
        init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'model.pth'), prefix=prefix)
        loaded = small_backbone(registered.VisionMamba, init_cfg=init_cfg)
        loaded.init_weights()
    assert_same_weights(loaded, model)
    lines = [text for text in said if 'has nothing under the prefix' in text]
    assert len(lines) == (prefix == 'encoder.')
    assert all("the prefix 'encoder.': its backbone is under 'backbone.'" in text for text in lines)
