"""Outputs that would replace the data of a config, before anything is built or computed."""

from argparse import Namespace
from pathlib import Path

import pytest

from tests.tools.conftest import configs, data_root  # noqa: F401  fixtures
from vim_mm.engine.cli import read_config


def read(config, data, out, written='out', **options):
    given = dict(data_root=str(data), **options)
    return read_config(Namespace(config=str(config), cfg_options=given, **{written: Path(out)}))


@pytest.mark.parametrize(
    ('out', 'written'),
    [
        ('annotations/validation', 'out'),
        ('annotations/validation', 'output'),
        ('annotations/validation', 'record'),
        ('annotations/training', 'out'),
        ('annotations/../annotations/validation', 'out'),
        ('annotations/validation/000001.png', 'out'),
        ('annotations/validation/new/folder', 'out'),
        ('images/training', 'out'),
    ],
)
def test_labels_and_images_are_not_written_over(out, written, configs, data_root):  # noqa: F811
    with pytest.raises(
        ValueError, match=r'the output must be (another folder than|outside of) '
    ) as e:
        read(configs['seg'], data_root, data_root / out, written)
    assert '_dataloader.dataset' in str(e.value) and str(e.value).endswith(str(data_root / out))


def test_links_lead_there_as_well(configs, data_root, tmp_path):  # noqa: F811
    (tmp_path / 'out').symlink_to(data_root / 'annotations')
    for out in ('out/validation', 'out/validation/deeper'):
        with pytest.raises(ValueError, match='the output must be'):
            read(configs['seg'], data_root, tmp_path / out)


def test_the_file_of_an_evaluator(configs, data_root, tmp_path):  # noqa: F811
    pytest.importorskip('mmcv.ops', reason='detection needs mmcv with compiled operators')
    file = data_root / 'annotations/instances_val2017.json'
    (tmp_path / 'out.json').hardlink_to(file)
    with pytest.raises(ValueError, match=r'another file than (val_evaluator|.*dataset).*ann_file'):
        read(configs['det'], data_root, tmp_path / 'out.json')


@pytest.mark.parametrize('within', ['ConcatDataset', 'RepeatDataset'])
def test_data_within_others(within, configs, data_root):  # noqa: F811
    inner = read(configs['seg'], data_root, 'elsewhere').test_dataloader.dataset
    one, several = dict(times=2, dataset=inner), dict(datasets=[inner])
    dataset = dict(type=within, **(several if within == 'ConcatDataset' else one))
    options = {'test_dataloader.dataset': {'_delete_': True, **dataset}}
    labels = data_root / 'annotations/validation'
    with pytest.raises(ValueError, match='the output must be another folder'):
        read(configs['seg'], data_root, labels, **options)


@pytest.mark.parametrize('out', ['predictions', 'annotations/new', 'images/new', '.'])
def test_other_places_are_free(out, configs, data_root, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    read(configs['seg'], data_root, data_root / out)
    read(configs['seg'], data_root, out)


def test_a_data_set_around_the_working_directory(configs, data_root, monkeypatch):  # noqa: F811
    """Whoever works in the folder of the images still writes somewhere."""
    monkeypatch.chdir(data_root / 'images/validation')
    read(configs['seg'], data_root, 'work_dirs/infer')
    with pytest.raises(ValueError, match='another folder'):
        read(configs['seg'], data_root, '.')
