"""Every way into the package by which a file of weights comes: nothing of the file runs."""

import ast
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import timm
import torch
from mmengine.config import Config
from mmengine.model import BaseModule
from mmengine.registry import MODELS
from mmengine.runner import load_checkpoint
from mmengine.runner.checkpoint import CheckpointLoader, _load_checkpoint_with_prefix

from tests.checkpoints.bombs import BOMBS, program
from tests.engine.toy import ToyModel, make_backbone, make_runner
from vim_mm.checkpoints import NotACheckpointError, UnsafeCheckpointError, convert_checkpoint
from vim_mm.checkpoints.converted_file import as_checkpoint, write
from vim_mm.checkpoints.reading import read_as_data
from vim_mm.engine import activate
from vim_mm.engine.cli import load_model
from vim_mm.engine.saving.written import last_checkpoint

ROOT = Path(__file__).parents[2]
activate()


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory) -> dict:
    """What the runner writes."""
    work_dir = tmp_path_factory.mktemp('trained')
    make_runner(work_dir).train()
    return torch.load(work_dir / 'iter_2.pth', weights_only=False)


@pytest.fixture
def server(tmp_path) -> Iterator[str]:
    """The address of the files in the folder of the test."""
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    handler.log_message = lambda *_: None
    with ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f'http://127.0.0.1:{server.server_port}'
        server.shutdown()


def start(path: Path, work_dir: Path) -> None:
    make_runner(work_dir, load_from=str(path)).train()


def resume(path: Path, work_dir: Path) -> None:
    make_runner(work_dir, load_from=str(path), resume=True).train()


def resume_by_pointer(path: Path, work_dir: Path) -> None:
    """As --resume without a file: the work directory tells which."""
    work_dir.mkdir()
    (work_dir / 'iter_1.pth').write_bytes(path.read_bytes())
    (work_dir / 'last_checkpoint').write_text(str(work_dir / 'iter_1.pth'))
    make_runner(work_dir, load_from=str(last_checkpoint(work_dir)), resume=True).train()


def evaluate(path: Path, work_dir: Path) -> None:
    make_runner(work_dir, load_from=str(path)).test()


def predict(path: Path, work_dir: Path) -> None:
    """As infer.py, stream.py, visualize.py and the exports."""
    if 'ToyModel' not in MODELS:
        MODELS.register_module(module=ToyModel)
    load_model(Config(dict(default_scope='mmengine', model=dict(type='ToyModel'))), path)


def convert(path: Path, work_dir: Path) -> None:
    """As convert_checkpoint.py, and somebody who reads what it wrote."""
    conversion = convert_checkpoint(read_as_data(path))
    write(as_checkpoint(conversion, str(path)), work_dir / 'converted.pth')
    start(work_dir / 'converted.pth', work_dir)


def pretrained(path: Path, work_dir: Path) -> None:
    init_cfg = dict(type='Pretrained', checkpoint=str(path))
    make_runner(work_dir, ToyModel(init_cfg=init_cfg)).train()


def pretrained_part(path: Path, work_dir: Path) -> None:
    init_cfg = dict(type='Pretrained', checkpoint=str(path), prefix='backbone.')
    make_backbone(init_cfg=init_cfg).init_weights()


def pretrained_of_another_module(path: Path, work_dir: Path) -> None:
    BaseModule(dict(type='Pretrained', checkpoint=str(path))).init_weights()


def mmengine_function(path: Path, work_dir: Path) -> None:
    load_checkpoint(ToyModel(), str(path))


def mmengine_prefix(path: Path, work_dir: Path) -> None:
    _load_checkpoint_with_prefix('backbone', str(path))


def evaluate_as_inferencers(path: Path, work_dir: Path) -> None:
    """MMEngine's inferencers take the config of the checkpoint where none is given."""
    checkpoint = CheckpointLoader.load_checkpoint(str(path))
    for text in (
        checkpoint.get('message_hub', {}).get('runtime_info', {}).get('cfg'),
        checkpoint.get('meta', {}).get('cfg'),
    ):
        if text is not None:
            Config.fromstring(text, '.py')


def timm_model(pretrained: bool = True, **options) -> None:
    sizes = dict(embed_dim=8, depth=1, img_size=8, patch_size=4)
    timm.create_model('vim_tiny_patch16_224', pretrained=pretrained, **sizes, **options)


def timm_overlay(path: Path, work_dir: Path) -> None:
    timm_model(pretrained_cfg_overlay=dict(file=str(path)))


def timm_cfg(path: Path, work_dir: Path) -> None:
    timm_model(pretrained_cfg=dict(file=str(path)))


def timm_folder(path: Path, work_dir: Path) -> None:
    work_dir.mkdir()
    (work_dir / 'pytorch_model.bin').write_bytes(path.read_bytes())
    timm_model(pretrained_cfg=dict(source='local-dir', file=str(work_dir)))


def timm_checkpoint(path: Path, work_dir: Path) -> None:
    timm_model(pretrained=False, checkpoint_path=str(path))


# Those that train read by mmengine_function, too, each bomb in a run of its own.
TRAINING = [start, resume, resume_by_pointer, evaluate, convert, pretrained]
DOORS = [
    *(pytest.param(door, marks=pytest.mark.slow) for door in TRAINING),
    *(predict, pretrained_part, pretrained_of_another_module),
    *(mmengine_function, mmengine_prefix, evaluate_as_inferencers),
    *(timm_overlay, timm_cfg, timm_folder, timm_checkpoint),
]


def send_all(door: Callable, checkpoint: dict, folder: Path) -> None:
    """Each bomb through the door; then somebody reads the configs that the run has written."""
    for number, (name, write_bomb) in enumerate(BOMBS.items()):
        marker, path = folder / f'marker{number}', folder / f'bomb{number}.pth'
        work_dir = folder / f'run{number}'
        write_bomb(path, checkpoint, marker)
        try:
            door(path, work_dir)
        except (UnsafeCheckpointError, NotACheckpointError) as error:
            assert len(str(error).splitlines()) == 1, name
        except (RuntimeError, ValueError, AssertionError):
            pass  # the weights are not of this model
        for config in work_dir.rglob('*.py'):
            Config.fromfile(config)
        for written in work_dir.glob('iter_2.pth'):
            content = torch.load(written, weights_only=False)  # by somebody without this package
            Config.fromstring(content['meta']['cfg'], '.py')
            Config.fromstring(content['message_hub']['runtime_info'].get('cfg', ''), '.py')
        assert not marker.exists(), f'{name} has run through {door}'


@pytest.mark.parametrize('door', DOORS, ids=lambda door: door.__name__)
def test_nothing_of_a_file_runs(door, checkpoint, tmp_path):
    send_all(door, checkpoint, tmp_path)


def test_nothing_of_a_url_runs(checkpoint, server, tmp_path, monkeypatch):
    monkeypatch.setattr('torch.hub._hub_dir', str(tmp_path / 'hub'))
    send_all(
        lambda path, _: load_checkpoint(ToyModel(), f'{server}/{path.name}'), checkpoint, tmp_path
    )


def test_nothing_of_a_name_in_a_list_runs(checkpoint, server, tmp_path, monkeypatch):
    monkeypatch.setattr('torch.hub._hub_dir', str(tmp_path / 'hub'))

    def door(path: Path, work_dir: Path) -> None:
        urls = dict(vim=f'{server}/{path.name}')
        monkeypatch.setattr('vim_mm.checkpoints.reading.get_torchvision_models', lambda: urls)
        load_checkpoint(ToyModel(), 'torchvision://vim')

    send_all(door, checkpoint, tmp_path)


def test_nothing_runs_that_timm_downloads(checkpoint, server, tmp_path, monkeypatch):
    monkeypatch.setattr('torch.hub._hub_dir', str(tmp_path / 'hub'))
    send_all(
        lambda path, _: timm_model(pretrained_cfg_overlay=dict(url=f'{server}/{path.name}')),
        checkpoint,
        tmp_path,
    )


def test_nothing_of_the_hugging_face_hub_runs(checkpoint, tmp_path, monkeypatch):
    def door(path: Path, work_dir: Path) -> None:
        monkeypatch.setattr('huggingface_hub.hf_hub_download', lambda *_, **__: str(path))
        timm_model(pretrained_cfg=dict(hf_hub_id='owner/name', source='hf-hub'))

    send_all(door, checkpoint, tmp_path)


def test_weights_of_another_model_are_named_with_their_file(tmp_path):
    torch.save(ToyModel(classes=5).state_dict(), tmp_path / 'other.pth')
    shapes = r'head\.weight.*\[5, 8, 1, 1\].*\[3, 8, 1, 1\]'
    with pytest.raises(RuntimeError, match=rf'(?s)other\.pth: .*{shapes}'):
        predict(tmp_path / 'other.pth', tmp_path)


# What runs nothing by itself: it is read later, or by a release of torch that is not this one.
PATIENT = {
    *('pop is replaced', 'get is replaced', 'config', 'cfg', 'cfg of the hub', 'getattr'),
    *('metadata with a key', 'metadata with a text', 'started_from', 'started_from, its name'),
    *('vim_mm', 'log with methods', 'factory', 'partial', 'hooks', 'TorchScript', 'tar'),
}


def unpickle(path: Path) -> None:
    pickle.loads(path.read_bytes())


@pytest.mark.parametrize('name', [name for name in BOMBS if name not in PATIENT])
def test_the_bombs_work(name, checkpoint, tmp_path):
    """Where a file is read without care; otherwise the tests above could not fail."""
    marker, path = tmp_path / 'marker', tmp_path / 'bomb.pth'
    BOMBS[name](path, checkpoint, marker)
    for load in (partial(torch.load, weights_only=False), unpickle):
        with suppress(Exception):  # after it has run
            load(path)
    assert marker.exists()


def test_a_config_that_is_evaluated_makes_the_folder(tmp_path):
    Config.fromstring(program(tmp_path / 'marker'), '.py')
    assert (tmp_path / 'marker').exists()


# Names by which Python, torch, NumPy, YAML and MMEngine unpickle, evaluate or load weights.
DANGEROUS = re.compile(
    r'(builtins\.)?(eval|exec|__import__)|(pickle|_pickle|dill|joblib|marshal|shelve|runpy)\..*|'
    r'torch\.(load|jit\.load|hub\.load.*|package\..*)|(np|numpy)\.(load|lib\..*)|'
    r'(.*\.)?(literal_eval|fromstring|genops|safe_globals|allow_pickle)|'
    r'yaml\.(load|load_all|full_load|unsafe_load|Loader|UnsafeLoader)|'
    r'(.*\.)?(load_checkpoint|load_file|load_state_dict_from_\w+|load_pretrained|hf_hub_download)'
)
# Every place that uses one of them, and why it may.
PLACES = {
    # The one reader, which parses opcodes; the library of safetensors, whose files are data.
    'vim_mm/checkpoints/unpickle.py': {'pickle.UnpicklingError', 'pickletools.genops'},
    'vim_mm/checkpoints/file.py': {'load_file', 'safetensors.torch.load_file'},
    # Literals of a config's text that is parsed, and of notes in a file that was just exported.
    'vim_mm/checkpoints/switches.py': {'ast.literal_eval'},
    'vim_mm/export/onnx_file.py': {'ast.literal_eval'},
    # MMEngine's function, whose readers are this package's once it is activated.
    'vim_mm/engine/runner.py': {'super.load_checkpoint'},
    # timm's own reader, which for our models is replaced.
    'vim_mm/timm_models/vim.py': {'_factory.load_checkpoint', 'load_checkpoint'},
    # A file that is then read as data.
    'vim_mm/timm_models/weights.py': {'hf_hub_download', 'huggingface_hub.hf_hub_download'},
    # The user's own program.
    'vim_mm/activated.py': {'runpy.run_path'},
    # What a loader's worker has sent, which PyTorch unpickles too.
    'vim_mm/engine/batches/transport.py': {'pickle.HIGHEST_PROTOCOL', 'pickle.Unpickler'},
    # Bytes that the same process has written; arrays without objects, which is NumPy's default.
    'studies/discretization/tasks.py': {'np.load'},
}


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f'{dotted(node.value)}.{node.attr}'
    if isinstance(node, ast.Call):
        return dotted(node.func)
    return node.id if isinstance(node, ast.Name) else ''


def dangerous_names(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names |= {f'{node.module}.{alias.name}' for alias in node.names}
        elif isinstance(node, ast.Name | ast.Attribute):
            names.add(dotted(node))
        elif isinstance(node, ast.keyword) and node.arg in ('allow_pickle', 'weights_only'):
            names.add('torch.load')
    return {name for name in names if DANGEROUS.fullmatch(name)}


def test_no_other_place_unpickles_or_evaluates():
    rooms = ('vim_mm', 'tools', 'benchmarks', 'studies', 'configs')
    files = [path for room in rooms for path in (ROOT / room).rglob('*.py')]
    found = {path.relative_to(ROOT).as_posix(): dangerous_names(path) for path in files}
    assert {path: names for path, names in found.items() if names} == PLACES
