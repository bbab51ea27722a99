"""Each released file is what its released config builds: every weight, every switch."""

import pytest
import torch
from mmengine.config import Config

from tests.checkpoints import released
from vim_mm.checkpoints import convert_checkpoint, fit
from vim_mm.checkpoints.converted_file import differences
from vim_mm.config import config_path
from vim_mm.engine import activate
from vim_mm.engine.converted_model import build_model

PLUS = 'vim_{}_patch16_stride8_224_bimambav2_final_pool_mean_abs_pos_embed_with_midclstok_div2'


def on_meta(shapes):
    return {name: torch.empty(shape, device='meta') for name, shape in shapes.items()}


def classifier(size, name, tokens=197):
    weights = on_meta(released.classifier_shapes(released.SIZES[size], tokens=tokens))
    return released.as_classifier(weights, name.format(size))


def segmentor(size, rope):
    width = released.SIZES[size]
    weights = on_meta(released.segmentor_shapes(width, tokens=1024))
    table = released.rope_table(32, width) if rope else {}
    return released.as_segmentor(weights | {f'backbone.{k}': v for k, v in table.items()})


def detector():
    table = {f'backbone.net.{k}': v for k, v in released.rope_table(64, 192).items()}
    return released.as_detector(on_meta(released.detector_shapes(192)) | table)


FILES = {
    'cls/vim_t_zoh_released.py': lambda: classifier('tiny', released.MODEL_NAME),
    'cls/vim_s_zoh_released.py': lambda: classifier('small', released.MODEL_NAME),
    'cls/vim_b_zoh_released.py': lambda: classifier('base', released.MODEL_NAME),
    'cls/vim_t_stride8_zoh_released.py': lambda: classifier('tiny', PLUS, 730),
    'cls/vim_s_stride8_zoh_released.py': lambda: classifier('small', PLUS, 730),
    'seg/upernet_vim_t_zoh_released.py': lambda: segmentor('tiny', rope=False),
    'seg/upernet_vim_s_zoh_released.py': lambda: segmentor('small', rope=True),
    'det/cascade_mask_rcnn_vim_t_zoh_released.py': detector,
}


@pytest.mark.parametrize('config', FILES)
def test_the_released_file_fits_the_released_config(config):
    activate()
    conversion = convert_checkpoint(FILES[config]())
    target = build_model(Config.fromfile(config_path(config)))
    assert differences(conversion, target) == []
    report = fit(conversion, target)
    assert report.complete and not report.resized
