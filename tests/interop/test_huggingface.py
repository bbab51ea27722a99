"""Vim as a backbone of transformers; nox -s adapters has it installed."""

import pytest
import timm
import torch

pytest.importorskip('transformers', '5')

import transformers
from safetensors.torch import load_file, save_file

from vim_mm.interop.huggingface import VimBackbone, VimConfig
from vim_mm.models import VisionMamba
from vim_mm.ops import METHODS

SMALL = dict(arch=dict(embed_dims=32, num_layers=4), img_size=64, ssm_cfg=dict(d_state=4))


def train_a_step(model, **inputs):
    loss = model(**inputs).loss
    loss.backward()
    assert torch.isfinite(loss)
    of_ours = [(n, w) for n, w in model.named_parameters() if '.layers.' in n and '.mixer.' in n]
    assert of_ours
    for name, weight in of_ours:
        assert weight.grad.abs().sum() > 0, name


def images(batch=2, height=64, width=64):
    return torch.randn(batch, 3, height, width)


def test_outputs_are_those_of_the_backbone():
    config = VimConfig(**SMALL, out_indices=[1, 3], cls_token='middle')
    model = transformers.AutoBackbone.from_config(config).eval()
    assert isinstance(model, VimBackbone)
    own = VisionMamba(**SMALL, out_indices=[1, 3], out_feature='norm', cls_token='middle').eval()
    own.load_state_dict(model.backbone.state_dict())
    x = images(height=96)
    for ours, expected in zip(model(x).feature_maps, own(x), strict=True):
        assert torch.equal(ours, expected)
    assert model.channels == [32, 32] and model.out_features == ['layers.1', 'layers.3']


def test_without_return_dict_the_answer_is_a_tuple():
    x = images()
    for given, asked in ((dict(return_dict=False), {}), ({}, dict(return_dict=False))):
        model = VimBackbone(VimConfig(**SMALL, **given)).eval()
        answer = model(x, **asked)
        assert type(answer) is tuple and len(answer) == 1
        assert torch.equal(answer[0][0], model(x, return_dict=True).feature_maps[0])
        maps, states = model(x, output_hidden_states=True, **asked)
        assert torch.equal(maps[0], answer[0][0]) and len(states) == 5


@pytest.mark.parametrize('more', [{}, dict(out_indices=[0, 2]), dict(pyramid_channels=16)])
@pytest.mark.parametrize('if_rope', [False, True])
def test_hidden_states_are_the_stream_around_every_layer(more, if_rope):
    given = dict(SMALL, cls_token='middle', if_rope=if_rope, if_rope_residual=if_rope)
    model = VimBackbone(VimConfig(**given, **more, output_hidden_states=True)).eval()
    count = len(model.backbone.layers)
    assert count == (3 if 'out_indices' in more else 4)
    taps = dict(out_indices=range(count), out_feature='residual', out_type='raw')
    own = VisionMamba(**given, **taps).eval()
    own.load_state_dict(model.backbone.state_dict(), strict=False)  # it has no norms of outputs
    x = images()
    answer = model(x)
    seen = []
    model.backbone.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    for state, expected in zip(answer.hidden_states, [None, *own(x)], strict=True):
        if expected is None:
            model(x, output_hidden_states=False)
            (expected,) = seen
        assert state.shape == (2, 17, 32)
        # own turns the last one, if a layer of the architecture follows.
        if state is not answer.hidden_states[-1] or count == 4 or not if_rope:
            torch.testing.assert_close(state, expected)
    plain = model(x, output_hidden_states=False)
    assert plain.hidden_states is None
    for one, two in zip(answer.feature_maps, plain.feature_maps, strict=True):
        assert torch.equal(one, two)


def test_stages_that_the_model_was_not_built_with_are_refused():
    model = VimBackbone(VimConfig(**SMALL))
    for change in (
        lambda: setattr(model, 'out_features', ['layers.0', 'layers.1']),
        lambda: setattr(model.config, 'out_indices', [0, 3]),
    ):
        change()
        with pytest.raises(ValueError, match=r"built with out_features \['layers.3'\], got"):
            model(images())
    pyramid = VimBackbone(VimConfig(**SMALL, pyramid_channels=16))
    pyramid.out_features = ['stride8']
    assert [m.shape[-1] for m in pyramid(images()).feature_maps] == [8]


def test_checkpointing_as_transformers_asks_for_it():
    model = VimBackbone(VimConfig(**SMALL))
    model.gradient_checkpointing_enable()
    assert model.backbone.with_cp and model.is_gradient_checkpointing
    calls = []
    model.backbone.layers[1].register_forward_pre_hook(lambda *_: calls.append(1))
    model(images()).feature_maps[0].sum().backward()
    assert len(calls) == 2
    model.gradient_checkpointing_disable()
    assert not model.backbone.with_cp


@pytest.mark.parametrize(
    ('given', 'dtype'),
    [
        (dict(dtype=torch.bfloat16), torch.bfloat16),
        (dict(torch_dtype='bfloat16'), torch.bfloat16),
        (dict(dtype='auto', device_map='cpu'), torch.float16),
        (dict(dtype=torch.float32, device_map='auto'), torch.float32),
        (dict(dtype=torch.float32, device_map={'': 'cpu'}, out_indices=[1, 3]), torch.float32),
    ],
)
def test_what_from_pretrained_takes(given, dtype, tmp_path):
    model = VimBackbone(VimConfig(**SMALL, out_indices=[0, 1, 3])).half()
    model.save_pretrained(tmp_path)
    read = transformers.AutoModel.from_pretrained(tmp_path, **given)
    assert isinstance(read, VimBackbone) and not read.training
    assert read.out_indices == given.get('out_indices', [0, 1, 3])
    assert {w.dtype for w in read.parameters()} == {dtype}
    for name, weight in read.state_dict().items():
        assert torch.equal(weight.cpu(), model.state_dict()[name].to(dtype)), name
    given_images = images().to(read.device, dtype)  # 'auto' is a GPU where there is one
    assert all(m.dtype == dtype for m in read(given_images).feature_maps)


def test_dtype_of_a_configuration():
    for given in (dict(dtype='bfloat16'), dict(dtype=torch.bfloat16)):
        model = transformers.AutoBackbone.from_config(VimConfig(**SMALL, **given))
        assert model.dtype == torch.bfloat16
    model = transformers.AutoModel.from_config(VimConfig(**SMALL), dtype=torch.float64)
    assert model(images().double()).feature_maps[0].dtype == torch.float64


@pytest.mark.parametrize('method', METHODS)
def test_every_argument_survives_a_file(method, tmp_path):
    given = dict(
        img_size=(64, 96), patch_size=8, stride=(4, 8), in_channels=1, discretization_method=method,
        cls_token='double', if_rope=True, drop_path_rate=0.25, out_feature='mixer', with_cp=True,
    )  # fmt: skip
    config = VimConfig(**{**SMALL, **given}, out_features=['layers.0', 'layers.2'])
    model = VimBackbone(config).eval()
    model.save_pretrained(tmp_path)
    read = VimBackbone.from_pretrained(tmp_path).eval()
    assert read.config.to_diff_dict() == model.config.to_diff_dict()
    assert transformers.AutoConfig.from_pretrained(tmp_path).arguments() == config.arguments()
    assert read.backbone.layers[0].mixer.discretization_method == method
    x = torch.randn(1, 1, 64, 96)
    for one, two in zip(model(x).feature_maps, read(x).feature_maps, strict=True):
        torch.testing.assert_close(one, two)


def test_what_is_misspelled_is_refused():
    with pytest.raises(TypeError, match='discretization_methd'):
        VimConfig(**SMALL, discretization_methd='foh')
    with pytest.raises(ValueError, match='bilinaer'):
        VimBackbone(VimConfig(**SMALL, discretization_method='bilinaer'))
    for strides in (dict(stride=(8, 4)), dict(patch_size=6), dict(stride=2)):
        with pytest.raises(ValueError, match='one stride, divisible by 4, got'):
            VimConfig(**SMALL, **strides, pyramid_channels=16)
    with pytest.raises(ValueError, match='stage_names'):
        VimConfig(**SMALL, out_features=['layers.4'])


@pytest.mark.parametrize(
    ('had', 'given'),
    [
        ({}, dict(arch=dict(embed_dims=32, num_layers=6))),
        ({}, dict(pyramid_channels=16)),
        (dict(pyramid_channels=16), dict(pyramid_channels=None)),
        (dict(pyramid_channels=16), dict(stride=8)),
    ],
)
def test_arguments_of_other_stages_do_not_change_in_a_configuration(had, given, tmp_path):
    """transformers sets attributes, and the stages would keep their names."""
    model = VimBackbone(VimConfig(**SMALL, **had))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match='make a VimConfig of these arguments'):
        VimBackbone.from_pretrained(tmp_path, **given)
    for name, value in given.items():
        setattr(model.config, name, value)
    with pytest.raises(ValueError, match='make a VimConfig of these arguments'):
        VimBackbone(model.config)


def test_what_is_misspelled_for_a_saved_configuration_is_refused(tmp_path):
    VimConfig(**SMALL).save_pretrained(tmp_path)
    for kind in (VimConfig, transformers.AutoConfig):
        assert kind.from_pretrained(tmp_path, discretization_method='rk4', num_labels=5)
        with pytest.raises(TypeError, match='VimConfig has no discretization_methd'):
            kind.from_pretrained(tmp_path, discretization_methd='rk4')


def test_attentions_are_refused():
    with pytest.raises(ValueError, match='VimBackbone gives no attentions'):
        VimBackbone(VimConfig(**SMALL, output_attentions=True))
    with pytest.raises(ValueError, match='VimBackbone gives no attentions'):
        VimBackbone(VimConfig(**SMALL))(images(), output_attentions=True)


def test_images_too_small_for_a_pyramid():
    model = VimBackbone(VimConfig(**SMALL, pyramid_channels=16))
    assert model(images(height=32, width=32)).feature_maps[-1].shape[-2:] == (1, 1)
    for height, width in ((16, 16), (16, 32), (32, 16)):
        with pytest.raises(ValueError, match='two rows and columns of patches or more, got'):
            model(images(height=height, width=width))


def test_names_of_transformers_serve_too():
    config = VimConfig(**{**SMALL, 'img_size': 32}, num_channels=5)
    assert config.arguments()['in_channels'] == 5 and config.image_size == 32


def test_initialization_is_vims_and_missing_weights_get_theirs(tmp_path):
    torch.manual_seed(0)
    model = VimBackbone(VimConfig(**SMALL))
    torch.manual_seed(0)
    own = VisionMamba(**SMALL, out_feature='norm')
    for name, value in own.state_dict().items():
        assert torch.equal(value, model.backbone.state_dict()[name]), name

    model.save_pretrained(tmp_path)
    file = tmp_path / 'model.safetensors'
    weights = load_file(file)
    with torch.no_grad():
        for layer in model.backbone.layers:
            layer.mixer.A_log.zero_()
    missing = 'backbone.layers.1.mixer.A_log'
    expected = weights.pop(missing)
    save_file(weights, file, dict(format='pt'))
    read = VimBackbone.from_pretrained(tmp_path).state_dict()
    assert torch.equal(read[missing], expected)  # as every initial A_log
    for name, value in weights.items():
        assert torch.equal(read[name], value), name


def test_timm_names_carry_the_method():
    config = transformers.TimmBackboneConfig(backbone='vim_tiny_patch16_224_foh')
    with torch.device('meta'):
        model = transformers.TimmBackbone(config)
    mixers = [m for m in model.modules() if hasattr(m, 'discretization_method')]
    assert mixers and {m.discretization_method for m in mixers} == {'foh'}


def test_a_classifier_by_its_timm_name_starts_as_vim_does():
    """transformers' wrapper would draw every linear layer anew, and make the bias of dt zero."""
    given = dict(depth=2, discretization_method='foh')
    config = transformers.TimmWrapperConfig(architecture='vim_tiny_patch16_224', model_args=given)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageClassification.from_config(config).timm_model
    torch.manual_seed(0)
    own = timm.create_model('vim_tiny_patch16_224', num_classes=model.num_classes, **given)
    for name, value in own.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def reads_what_it_saved(model, folder):
    model.eval().save_pretrained(folder)
    saved = load_file(folder / 'model.safetensors')
    assert sum(name.endswith('mixer.out_proj.weight') for name in saved) == 4
    read, report = type(model).from_pretrained(folder, output_loading_info=True)
    assert not report['missing_keys'] and not report['unexpected_keys']
    for (name, one), two in zip(
        model.state_dict().items(), read.state_dict().values(), strict=True
    ):
        assert torch.equal(one, two), name
    return read.eval()


@pytest.mark.slow
def test_upernet(tmp_path):
    backbone = VimConfig(**SMALL, discretization_method='rk4', out_indices=[0, 1, 2, 3])
    config = transformers.UperNetConfig(
        backbone_config=backbone, hidden_size=32, num_labels=5,
        auxiliary_in_channels=32, auxiliary_channels=16,
    )  # fmt: skip
    model = transformers.UperNetForSemanticSegmentation(config)
    train_a_step(model, pixel_values=images(), labels=torch.randint(5, (2, 64, 64)))
    assert len(model(images(), output_hidden_states=True).hidden_states) == 5
    read = reads_what_it_saved(model, tmp_path)
    assert read.backbone.backbone.layers[0].mixer.discretization_method == 'rk4'
    x = images()
    torch.testing.assert_close(read.eval()(x).logits, model.eval()(x).logits)


@pytest.mark.slow
def test_detr(tmp_path):
    config = transformers.DetrConfig(
        backbone_config=VimConfig(**SMALL), d_model=32, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
        decoder_ffn_dim=32, num_queries=5,
    )  # fmt: skip
    target = dict(class_labels=torch.tensor([1]), boxes=torch.tensor([[0.5, 0.5, 0.2, 0.2]]))
    model = transformers.DetrForObjectDetection(config)
    train_a_step(model, pixel_values=images(), labels=[target, target])
    reads_what_it_saved(model, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize('family', ['RTDetr', 'DFine'])
def test_its_successors(family, tmp_path):
    backbone = VimConfig(**SMALL, pyramid_channels=16, out_indices=[1, 2, 3])
    config = getattr(transformers, f'{family}Config')(
        backbone_config=backbone, encoder_hidden_dim=32, encoder_in_channels=[16, 16, 16],
        encoder_ffn_dim=32, encoder_attention_heads=2, d_model=32, decoder_layers=2,
        decoder_ffn_dim=32, decoder_attention_heads=2, decoder_in_channels=[32, 32, 32],
        num_queries=5, num_denoising=0,
    )  # fmt: skip
    model = getattr(transformers, f'{family}ForObjectDetection')(config)
    read = reads_what_it_saved(model, tmp_path)
    x = images()
    torch.testing.assert_close(read(x).logits, model(x).logits)


@pytest.mark.slow
def test_mask2former(tmp_path):
    config = transformers.Mask2FormerConfig(
        backbone_config=VimConfig(**SMALL, pyramid_channels=16), feature_size=32,
        mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=32, dim_feedforward=32,
        encoder_layers=1, decoder_layers=2, num_attention_heads=2, num_queries=5, num_labels=3,
    )  # fmt: skip
    model = transformers.Mask2FormerForUniversalSegmentation(config)
    masks, classes = torch.ones(1, 64, 64), torch.tensor([1])
    inputs = dict(pixel_values=images(), mask_labels=[masks] * 2, class_labels=[classes] * 2)
    train_a_step(model, **inputs)
    reads_what_it_saved(model, tmp_path)


def test_stages_of_a_pyramid():
    config = VimConfig(**SMALL, pyramid_channels=16, out_features=['stride8', 'stride32'])
    model = VimBackbone(config)
    assert [tuple(m.shape[1:]) for m in model(images()).feature_maps] == [(16, 8, 8), (16, 2, 2)]
    assert model.channels == [16, 16]
