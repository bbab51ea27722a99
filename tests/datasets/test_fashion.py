"""Fashion-MNIST and scenes of it, from tiny IDX files drawn here: no network."""

import hashlib
import json
import re
import runpy
import shutil
import sys
from collections import Counter

import cv2
import numpy as np
import pytest
from mmengine.config import Config

from tests.datasets.idx import COUNTS, draw_garment, write_idx_files
from tests.scripts import ROOT
from vim_mm.datasets import fashion, garments
from vim_mm.datasets.fashion import FashionConfig, class_folder, write_classes, write_scenes
from vim_mm.datasets.garments import (
    CHECKSUMS,
    GARMENTS,
    SPLITS,
    fetch_garments,
    load_garments,
)
from vim_mm.datasets.scenes import SCENE_CLASSES, Garments, draw_scene, scene

CONFIG = FashionConfig(train=6, val=4, height=96, width=64)


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A folder of tiny files that the checksums are made to fit."""
    write_idx_files(tmp_path / 'source', monkeypatch)
    return tmp_path / 'source'


def _files(root):
    return {p.relative_to(root): p.read_bytes() for p in sorted(root.rglob('*')) if p.is_file()}


def test_fetch_unpacks_checks_and_keeps(source, tmp_path):
    out = tmp_path / 'idx'
    assert fetch_garments(out, source) == str(source)
    assert {file.name for file in out.iterdir()} == {*CHECKSUMS}
    images, labels = load_garments(out, 'test')
    assert images.shape == (20, 28, 28) and labels.tolist() == [*range(10)] * 2
    assert fetch_garments(out, tmp_path / 'nowhere') == str(out)


def test_a_changed_file_is_refused(source, tmp_path):
    name = 't10k-labels-idx1-ubyte'
    (source / name).write_bytes((source / name).read_bytes()[:-1] + b'\x05')
    with pytest.raises(ValueError, match=f'{name} in .* is not the published file'):
        fetch_garments(tmp_path / 'idx', source)
    assert not (tmp_path / 'idx').exists()


def _cut_off(packed):
    return packed[: len(packed) // 2]


def _garbled(packed):
    return packed[:40] + b'\xff' * 20 + packed[60:]


def _of_another_sum(packed):
    return packed[:-8] + b'\0\0\0\0' + packed[-4:]


@pytest.mark.parametrize('damage', [_cut_off, _garbled, _of_another_sum, lambda packed: b'text'])
def test_a_damaged_archive_is_named_and_replaced(damage, source, tmp_path):
    """Named where it is read; where the files go it is no obstacle."""
    good, out = tmp_path / 'good', tmp_path / 'idx'
    shutil.copytree(source, good)
    shutil.copytree(source, out)
    for folder in (source, out):
        archive = folder / 't10k-images-idx3-ubyte.gz'
        archive.write_bytes(damage(archive.read_bytes()))
    with pytest.raises(ValueError, match=f'{re.escape(str(archive))} is damaged: '):
        load_garments(out, 'test')
    with pytest.raises(ValueError, match=r'idx3-ubyte\.gz is damaged: '):
        fetch_garments(out, source)
    assert fetch_garments(out, good) == str(good)
    assert len(load_garments(out, 'test')[0]) == 20


def test_a_package_with_other_files_is_one_way_that_fails(source, tmp_path, monkeypatch):
    shutil.copytree(source, tmp_path / 'package')
    (tmp_path / 'package/t10k-labels-idx1-ubyte').write_bytes(b'other')
    monkeypatch.setattr(garments, '_PACKAGE_FOLDER', str(tmp_path / 'package'))
    monkeypatch.setattr(
        garments, '_from_package', lambda out: garments._copy(tmp_path / 'package', out)
    )
    monkeypatch.setattr(garments, '_from_torchvision', lambda out: garments._copy(source, out))
    assert fetch_garments(tmp_path / 'idx') == 'torchvision'


@pytest.mark.parametrize('module', ['shapes', 'fashion'])
def test_a_command_without_opencv_is_one_sentence(module, source, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'cv2', None)
    for name in (module, 'layouts'):
        monkeypatch.delitem(sys.modules, f'vim_mm.datasets.{name}', raising=False)
    options = ['--source', str(source)] if module == 'fashion' else []
    monkeypatch.setattr(sys, 'argv', [f'{module}.py', '--out', str(tmp_path / 'out'), *options])
    with pytest.raises(SystemExit, match=f'{module}.py: error: .*cv2'):
        runpy.run_module(f'vim_mm.datasets.{module}', run_name='__main__')


def test_ways_are_tried_in_order(source, tmp_path, monkeypatch):
    """The installed package, apt-get, torchvision; the message names all three and what to do."""

    def refuse(out):
        raise OSError('no network')

    monkeypatch.setattr(garments, '_PACKAGE_FOLDER', 'no/such/folder')
    monkeypatch.setattr(garments, '_from_package', refuse)
    monkeypatch.setattr(garments, '_from_torchvision', refuse)
    with pytest.raises(FileNotFoundError, match=r'--source DIR\. Tried: .*apt-get.*torchvision'):
        fetch_garments(tmp_path / 'idx')
    monkeypatch.setattr(garments, '_from_torchvision', lambda out: garments._copy(source, out))
    assert fetch_garments(tmp_path / 'idx') == 'torchvision'


@pytest.mark.parametrize('size', [(64, 64), (48, 100)])
def test_scene_masks(source, size):
    pool = Garments(*load_garments(source, 'train'))
    for i in range(10):
        drawn = scene(3, 'train', i, pool, size)
        assert drawn.image.shape == (*size, 3) and drawn.image.dtype == np.uint8
        assert drawn.masks.sum(axis=0).max() <= 1 and drawn.masks.any(axis=(1, 2)).all()
        assert set(np.unique(drawn.seg_map)) <= set(range(1, 12))
        again = scene(3, 'train', i, pool, size)
        np.testing.assert_array_equal(again.image, drawn.image)
        assert not np.array_equal(scene(4, 'train', i, pool, size).image, drawn.image)


def test_garments_are_as_large_as_they_should_be():
    """1 to 2.3 times: a box of 24 x 16 pixels, alone on the canvas."""
    pool = Garments(np.stack([draw_garment(9, 255)] * 2), np.array([9, 9], np.uint8))
    rng = np.random.default_rng(0)
    areas = [mask.sum() for _ in range(60) for mask in draw_scene(rng, pool, (128, 128)).masks[-1:]]
    whole = 23 * 16
    assert max(areas) <= 1.05 * whole * 2.3**2 and max(areas) > whole * 1.8**2


def test_scenes_hold_garments_of_their_split_only(source, monkeypatch, tmp_path):
    """Test garments are dark: what is handed to the validation scenes is theirs alone."""
    seen = {}
    real = fashion.scene

    def spy(seed, split, index, pool, size):
        seen.setdefault(split, set()).update(np.unique(pool.images).tolist())
        return real(seed, split, index, pool, size)

    monkeypatch.setattr(fashion, 'scene', spy)
    write_scenes(tmp_path / 'scenes', source, CONFIG)
    assert seen == {'train': {0, 100, 200}, 'test': {0, 50}}


def test_scenes_stay_what_they_are():
    """Their version, which is in the manifest, rises with any change of these."""
    images = np.stack([draw_garment(label, 60 + 15 * label) for label in range(10)])
    pool = Garments(images, np.arange(10, dtype=np.uint8))
    content = hashlib.sha256()
    for split in SPLITS:
        for index in range(5):
            drawn = scene(0, split, index, pool, (96, 64))
            content.update(drawn.image.tobytes() + drawn.seg_map.tobytes())
    assert content.hexdigest()[:16] == '182cad2a962bc523'


def test_same_seed_same_bytes(source, tmp_path):
    assert write_scenes(tmp_path / 'a', source, CONFIG)
    assert not write_scenes(tmp_path / 'a', source, CONFIG)
    write_scenes(tmp_path / 'b', source, CONFIG)
    assert _files(tmp_path / 'a') == _files(tmp_path / 'b')
    write_scenes(tmp_path / 'c', source, FashionConfig(6, 4, 96, 64, seed=1))
    name = 'images/training/000001.jpg'
    assert (tmp_path / 'a' / name).read_bytes() != (tmp_path / 'c' / name).read_bytes()


def test_classes_are_folders(source, tmp_path):
    assert write_classes(tmp_path / 'classes', source)
    names = [class_folder(label) for label in range(10)]
    assert names == sorted(names)
    for split, prefix in (('train', 'train'), ('test', 't10k')):
        files = [*(tmp_path / 'classes' / split).rglob('*.png')]
        assert Counter(f.parent.name for f in files) == dict.fromkeys(names, COUNTS[prefix] // 10)
    image = cv2.imread(str(tmp_path / 'classes/test/9_ankle_boot/00009.png'), cv2.IMREAD_UNCHANGED)
    np.testing.assert_array_equal(image, draw_garment(9, 50))


def test_torchvision_reads_the_classes(source, tmp_path):
    from torchvision.datasets import ImageFolder

    write_classes(tmp_path / 'classes', source)
    data = ImageFolder(tmp_path / 'classes/train')
    assert data.classes == [class_folder(i) for i in range(10)] and len(data) == 40


def test_mmpretrain_reads_the_classes(source, tmp_path):
    datasets = pytest.importorskip('mmpretrain.datasets', reason='mmpretrain is not installed')
    write_classes(tmp_path / 'classes', source)
    data = datasets.CustomDataset(data_root=str(tmp_path / 'classes'), data_prefix='test')
    assert len(data) == 20 and data.get_gt_labels().tolist() == sorted([*range(10)] * 2)


def _dataset(name, root):
    cfg = Config.fromfile(ROOT / f'studies/discretization/configs/_base_/datasets/{name}.py')
    return dict(cfg.val_dataloader.dataset, data_root=str(root))


def test_mmseg_reads_the_scenes(source, tmp_path):
    from mmseg.registry import DATASETS
    from mmseg.utils import register_all_modules

    register_all_modules()
    write_scenes(tmp_path / 'scenes', source, CONFIG)
    data = DATASETS.build(_dataset('fashion_seg', tmp_path / 'scenes'))
    assert len(data) == CONFIG.val and data.metainfo['classes'] == SCENE_CLASSES
    for sample in data:
        labels = sample['data_samples'].gt_sem_seg.data
        assert sample['inputs'].shape == (3, 96, 64) and labels.shape == (1, 96, 64)
        assert set(labels.unique().tolist()) <= set(range(11))


def test_mmdet_reads_the_scenes(source, tmp_path):
    from mmdet.registry import DATASETS
    from mmdet.utils import register_all_modules

    register_all_modules()
    write_scenes(tmp_path / 'scenes', source, CONFIG)
    data = DATASETS.build(_dataset('fashion_det', tmp_path / 'scenes'))
    assert len(data) == CONFIG.val and data.metainfo['classes'] == GARMENTS
    file = tmp_path / 'scenes/annotations/instances_val2017.json'
    expected = json.loads(file.read_text())['annotations']
    found = [sample['data_samples'].gt_instances for sample in data]
    assert sum(map(len, found)) == len(expected)
    for instances in found:
        for box, mask in zip(instances.bboxes.tensor, instances.masks.masks, strict=True):
            left, top, width, height = cv2.boundingRect(mask)
            np.testing.assert_array_equal(box, [left, top, left + width, top + height])


def test_command_line(source, tmp_path, capsys):
    out = tmp_path / 'out'
    command = ['--out', str(out), '--source', str(source), '--train', '2', '--val', '2']
    fashion.main(command)
    fashion.main(command)
    printed = capsys.readouterr().out
    assert printed.count('Made') == printed.count('Reusing') == 2
    fashion.main([*command, '--only', 'classes'])
    assert capsys.readouterr().out.splitlines()[1:] == [f'Reusing {out / "classes"}']
    with pytest.raises(SystemExit, match='error: height must be at least 32, got 8'):
        fashion.main([*command, '--size', '8', '64'])
