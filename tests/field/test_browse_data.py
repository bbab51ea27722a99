"""tools/browse_data.py draws samples, counts classes and names the files that look wrong."""

import re

import numpy as np
import pytest
from PIL import Image

from tests.field.base import CONFIG, coco, each_label
from tests.field.test_files import classifier
from tests.tools.conftest import run_tool


def browse(folder, text=None, *options):
    text = CONFIG.format(root=str(folder / 'data'), rest='') if text is None else text
    (folder / 'config.py').write_text(text)
    return run_tool('browse_data.py', 'config.py', '--out', 'drawn', *options, cwd=folder)


@pytest.mark.slow
def test_masks(folder):
    config = CONFIG.format(root=str(folder / 'data'), rest='')
    log = browse(folder, config.replace("'PackSeg", "'FastPackSeg"))  # as shipped
    assert len([*(folder / 'drawn').glob('*.png')]) == 8
    pixels = sum(map(int, re.findall(r'\| \d \w+ +\| +(\d+)', log.replace(',', ''))))
    assert pixels == 8 * 64 * 64 and 'Nothing looks wrong.' in log
    drawn = np.array(Image.open(folder / 'drawn/000000_000.png'))
    image = np.array(Image.open(folder / 'data/images/training/000.png'))
    assert drawn.shape[1] == 512 and drawn.shape[0] > 512, 'enlarged, with a legend below'
    assert (drawn[4:512:8, 4::8] != image).any(), 'the mask lies over the image'

    path = folder / 'data/annotations/training/002.png'
    Image.fromarray(np.full((64, 64), 7, np.uint8)).save(path)
    (folder / 'data/images/training/005.png').write_text('no image')
    log = browse(folder, None, '--images', '2')
    suspicious = log.partition('Suspicious:')[2]
    assert f'* {path}: a label is 7, but there are 3 classes' in suspicious
    assert re.search(r'\* .*training/005\.png: not a picture', suspicious)
    assert '| 7 ?' in log and suspicious.count('\n* ') == 2


@pytest.mark.slow
def test_masks_of_validation_that_hold_one_class(folder):
    each_label(folder / 'data', np.zeros_like)
    log = browse(folder, None, '--split', 'val')
    assert '4 maps of labels hold 0 (background), of 3 classes' in log


@pytest.mark.slow
def test_a_background_that_is_ignored_though_it_is_a_class(folder):
    rest = "train_dataloader['dataset'].update(reduce_zero_label=True)"
    log = browse(folder, CONFIG.format(root=str(folder / 'data'), rest=rest))
    assert re.search(
        r'\* reduce_zero_label=True: 0 in the files is ignored, 3 is green\. No pixel is green, '
        r'and \d\d\.\d percent are ignored\. If 0 is a class in the files, set reduce_zero',
        log,
    )


@pytest.mark.slow
def test_boxes(tmp_path):
    pytest.importorskip('mmcv.ops', reason='detection needs mmcv with compiled operators')
    log = browse(tmp_path, coco(tmp_path))
    assert re.search(r'\| 0 box \| +8 \| +100\.0 \|', log) and 'Nothing looks wrong.' in log
    assert len([*(tmp_path / 'drawn').glob('*.png')]) == 4


@pytest.mark.slow
def test_labels_of_classification(tmp_path):
    pytest.importorskip('mmpretrain')
    for name in ('apple', 'груша'):
        (tmp_path / 'fruit' / name).mkdir(parents=True)
        for i in range(3):
            Image.new('RGB', (32, 32)).save(tmp_path / 'fruit' / name / f'{i}.png')
    log = browse(tmp_path, classifier(tmp_path))
    assert re.search(r'\| 1 груша +\| +3 \| +50\.0 \|', log) and 'Nothing looks wrong.' in log
    drawn = sorted((tmp_path / 'drawn').glob('*.png'))
    assert len(drawn) == 6
    assert np.array(Image.open(drawn[0])).max() > 200, 'the class is written into the black image'


@pytest.mark.slow
def test_names_in_any_script(folder):
    rest = """
for loader in (train_dataloader, val_dataloader):
    loader['dataset']['metainfo'] = dict(classes=({}, 'red', 'green'), palette=[[9] * 3] * 3)
del loader
"""
    drawn = []
    for name in ("'мост'", "'????'", "'лист'"):
        browse(folder, CONFIG.format(root=str(folder / 'data'), rest=rest.replace('{}', name)))
        drawn.append(np.array(Image.open(folder / 'drawn/000000_000.png')))
    assert not np.array_equal(drawn[0], drawn[1]) and not np.array_equal(drawn[0], drawn[2])


@pytest.mark.slow
def test_boxes_that_are_left_out(tmp_path):
    pytest.importorskip('mmcv.ops', reason='detection needs mmcv with compiled operators')
    log = browse(tmp_path, coco(tmp_path, change=lambda each: each | dict(area=0)))
    assert '8 of 8 objects of' in log and 'none is left to be learnt' in log
    assert len(re.findall(r'\* .*\.jpg: no object', log)) == 4
