"""model-index.yml and the metafiles list every recipe, in the form that OpenMMLab's tools read."""

from collections import defaultdict
from pathlib import Path

import pytest
import yaml
from mmengine.config import Config

import vim_mm
from tests.scripts import load

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope='module')
def tool():
    return load('dev/write_metafiles.py')


def read(name: str) -> dict:
    return yaml.safe_load((ROOT / name).read_text())


def metafiles() -> list[str]:
    return read('model-index.yml')['Import']


@pytest.mark.slow
def test_files_are_what_the_tool_writes(tool):
    vim_mm.activate()
    for name, content in tool['files']().items():
        assert read(name) == content, f'{name}: run python tools/dev/write_metafiles.py'


def test_every_recipe_is_listed_once():
    listed = [model['Config'] for name in metafiles() for model in read(name)['Models']]
    recipes = [
        path.relative_to(ROOT).as_posix()
        for path in ROOT.glob('configs/[!_]*/*.py')
        if not any(own in path.stem for own in ('_shapes', '_fashion', '_earth'))
    ]
    assert sorted(listed) == sorted(recipes)


@pytest.mark.parametrize('name', metafiles())
def test_keys_are_those_of_the_schema(name):
    content = read(name)
    assert content.keys() == {'Collections', 'Models'}
    collections = {collection['Name']: collection for collection in content['Collections']}
    for collection in collections.values():
        assert collection.keys() == {'Name', 'Metadata', 'Paper', 'README', 'Code'}
        assert collection['Paper'].keys() == {'URL', 'Title'}
        assert (ROOT / collection['README']).is_file()
        assert isinstance(collection['Metadata']['Training Data'], list)
    names = [model['Name'] for model in content['Models']]
    assert len(set(names)) == len(names) > 0
    for model in content['Models']:
        # Results and Weights join them with the first published checkpoint.
        assert {'Name', 'In Collection', 'Config', 'Metadata'} <= model.keys()
        assert model.keys() <= {'Name', 'In Collection', 'Config', 'Metadata', 'Results', 'Weights'}
        assert model['In Collection'] in collections
        assert Path(model['Config']).stem == model['Name']


def test_a_collection_has_the_models_of_one_head():
    vim_mm.activate()
    kinds = defaultdict(set)
    for name in metafiles():
        for model in read(name)['Models']:
            if model['Metadata']['Discretization'] != 'zoh':  # those inherit its model
                continue
            cfg = Config.fromfile(ROOT / model['Config']).model
            kind = cfg.get('of', cfg.type)  # of a fast detector, the original
            kinds[model['In Collection']].add((kind, cfg.get('decode_head', {}).get('type')))
    collections = [kind for kinds_of_one in kinds.values() for kind in kinds_of_one]
    assert len(collections) == len(set(collections)) == len(kinds), kinds
    assert kinds.keys() == {c['Name'] for name in metafiles() for c in read(name)['Collections']}


def test_the_package_that_reads_them_takes_every_model():
    modelindex = pytest.importorskip('modelindex', reason='needs model-index')
    index = modelindex.load(str(ROOT / 'model-index.yml'))
    # It looks for pages beside the metafile; OpenMMLab's own name them from the root, as here.
    assert [e for e in index.check(silent=True) if 'Path to README file' not in e] == []
    assert len(index.models) == sum(len(read(name)['Models']) for name in metafiles()) > 0
    for model in index.models:
        # What it has of its collection.
        assert model.full_model.paper['URL'].startswith('https://arxiv.org/')
        assert 'Vision Mamba' in model.full_model.metadata.architecture
