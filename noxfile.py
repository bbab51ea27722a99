"""What the suite's environment does not hold, tested on demand, not by default.

    nox -s adapters                  # peft, transformers, segmentation_models_pytorch,
                                     # faster-coco-eval; minutes
    nox -s timm                      # timm's own tests of models on the five of Vim
    nox -s peers -- MAMBA VMAMBA     # those of mamba_ssm's and VMamba's scans on ours
    nox -s newest                    # newest releases, Python 3.11 to 3.13; -s newest-3.13

The original OpenMMLab libraries with three releases of torch:

    nox -s original                  # all sets; each compiles mmcv's operators, once a machine
    nox -s "original(torch-2.4)"     # one of them; -R takes its environment as it is
    nox -s "original(torch-2.4)" -- seg/upernet_vim_shapes.py      # one config

In each set some tests run on the installed package. Then the trainings of `make demo`,
`make demo-det` and `make demo-real` run for some iterations, are resumed, and tested at the end.
docs/backends.md describes the sets.
"""

import os
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import nox

ROOT = Path(__file__).parent
REQUIREMENTS = ROOT / 'requirements'
# torchvision and VIM_MM_BUILD by release of torch: the compiled extension needs 2.10.
SETS = {
    '2.11.0': ('0.26.0', '1'),
    '2.6.0': ('0.21.0', '0'),
    '2.4.1': ('0.19.1', '0'),
}
# torch and torchvision belong together; everything else comes in the newest release for the Python.
NEWEST = {'torch': 'torch==2.14.1', 'torchvision': 'torchvision==0.29.1'}
NEWEST_TESTS = (
    *(f'tests/{folder}' for folder in ('ops', 'models', 'engine', 'detection', 'export')),
    *(f'tests/{folder}' for folder in ('interop', 'jax')),
    'tests/test_timm_models.py',
)
# What their tests have for a GPU; the rows of a block mean nothing to our functions.
ON_A_CPU = (
    ("device = 'cuda'", "device = 'cpu'"),
    ('torch.float32', 'torch.float64'),
    ('torch.complex64', 'torch.complex128'),
    ('[768]', '[48]'),
    ('[1,2,3,4]', '[1]'),
)
HALF, WHOLE = 4, 8  # iterations before and after the resume: few, the slowest scan takes seconds
VALIDATED = 16  # pictures, all that there are of shapes
TESTS = (
    'tests/test_compat.py',
    'tests/checkpoints/test_reading.py',
    'tests/checkpoints/test_doors.py',
    'tests/engine/test_cli.py',
)
CONFIGS = ('seg/upernet_vim_shapes.py', 'det/mask_rcnn_vim_shapes.py', 'cls/vim_fashion_zoh.py')


@nox.session(python=False, default=False)
def adapters(session: nox.Session) -> None:
    """Other libraries on our models, in the environment of nox with them in a folder beside it."""
    folder = Path(session.create_tmp()) / 'adapters'
    install = ['-m', 'pip', 'install', '--quiet', '--no-deps', '--upgrade', '--target', folder]
    session.run(sys.executable, *install, '-r', REQUIREMENTS / 'adapters.txt')
    path = os.pathsep.join(map(str, (ROOT, folder)))
    # No skip for them.
    libraries = 'import faster_coco_eval, peft, segmentation_models_pytorch, transformers'
    session.run(sys.executable, '-c', libraries, env={'PYTHONPATH': path})
    faster_coco = 'tests/detection/test_faster_coco.py'
    for tests in (('tests/models/test_fused.py', '-k', 'peft'), ('tests/interop',), (faster_coco,)):
        session.run(sys.executable, '-m', 'pytest', '-q', *tests, env={'PYTHONPATH': path})


@nox.session(python=False, default=False)
def timm(session: nox.Session) -> None:
    """timm's tests/test_models.py, of the installed version's sdist, in the environment of nox.

    Its lists of models whose features it tests, and of those without spatial features, get Vim's
    name; nothing else in it is changed. TorchScript and FX are what Vim does not support.
    """
    name = f'timm-{version("timm")}'
    folder = Path(session.create_tmp())
    download = ['download', '--quiet', '--no-deps', '--no-binary', 'timm', '--dest', folder]
    session.run(sys.executable, '-m', 'pip', *download, name.replace('-', '=='))
    with tarfile.open(folder / f'{name}.tar.gz') as sdist:
        # With its settings of pytest, and without its package: the installed one is tested.
        for member in ('tests/test_models.py', 'pyproject.toml'):
            sdist.extract(f'{name}/{member}', folder)
    file = folder / name / 'tests' / 'test_models.py'
    text = file.read_text()
    for names, own in (('FEAT_INTER_FILTERS', 'vim'), ('NON_STD_FILTERS', 'vim_*')):
        beginning = f'\n{names} = [\n'
        if text.count(beginning) != 1:
            session.error(f'{name} has no list {names} that can be extended')
        text = text.replace(beginning, f'{beginning}    {own!r},\n')
    file.write_text(text)
    # Vim's names end in 224: not efficientvim's, nor ours by method and by pyramid.
    which = 'vim_ and (224] or 224.untrained]) and not torchscript and not fx'
    quiet = '-Wignore::pytest.PytestUnknownMarkWarning'  # it would mark timeouts
    arguments = ['-q', '-p', 'vim_mm', quiet, '-k', which, *session.posargs, file]
    session.run(sys.executable, '-m', 'pytest', *arguments, env={'PYTHONPATH': f'{ROOT}'})


@nox.session(python=False, default=False)
def peers(session: nox.Session) -> None:
    """The scan tests of mamba_ssm and VMamba on our drop-ins; MAMBA and VMAMBA are clones.

    On a GPU in their tolerances. Without one in float64 and smaller, which takes minutes.
    """
    if len(session.posargs) != 2:
        session.error('expected two folders: clones of state-spaces/mamba and MzeroMiko/VMamba')
    mamba, vmamba = (Path(folder).resolve() for folder in session.posargs)
    folder = Path(session.create_tmp())
    text = (vmamba / 'kernels/selective_scan/test_selective_scan.py').read_text()
    mode, sharing = '\nMODE = "mamba_ssm_ssoflex"', '\nDIM1 = [24]'
    if not text.count(mode) == text.count(sharing) == 1:
        session.error(f'the test in {vmamba} has no setting{mode} or{sharing}')
    tests = {
        'mamba': (mamba / 'tests/ops/test_selective_scan.py').read_text(),
        # Beside the reference, not another extension; step sizes that channels share for one.
        'oflex': text.replace(mode, '\nMODE = "ssoflex"'),
        'core': text.replace(mode, '\nMODE = "sscore"').replace(sharing, ''),
    }
    gpus = subprocess.check_output([ROOT / 'tools/dev/gpu_architectures.sh'], text=True).strip()
    for name, text in tests.items():
        for theirs, ours in () if gpus else ON_A_CPU:
            text = text.replace(theirs, ours)
        (folder / f'test_{name}.py').write_text(text)
    which = () if gpus else ('-k', 'itype0')  # the others have 16 bits
    arguments = ['-q', '-p', 'tests.interop.peers', *which, folder]
    path = {'PYTHONPATH': f'{ROOT}', 'MAMBA': f'{mamba}'}
    session.run(sys.executable, '-m', 'pytest', *arguments, env=path)


@nox.session(python=['3.11', '3.12', '3.13'], default=False)
def newest(session: nox.Session) -> None:
    """Fast tests with the newest releases of what has pins, on the extension of this checkout.

    It is the same binary for all of them. mmcv's operators are compiled, once a machine and Python.
    """
    files = [(REQUIREMENTS / f'{name}.txt').read_text() for name in ('runtime', 'mm', 'tests')]
    names = re.findall(r'^[\w-]+(?===)', '\n'.join(files), re.MULTILINE)
    session.install(*(NEWEST.get(name, name) for name in names), '-r', REQUIREMENTS / 'build.txt')
    session.install('--no-deps', '-r', REQUIREMENTS / 'mm-no-deps.txt')
    path = {'PYTHONPATH': f'{ROOT}', 'OMP_NUM_THREADS': '1'}
    session.run('python', ROOT / 'tools/dev/install_mmcv.py', '--with-ops', env=path)
    tests = session.posargs or NEWEST_TESTS
    session.run('python', '-m', 'pytest', '-q', '-m', 'not slow', *tests, env=path)


@nox.session(python='3.11', default=False)
@nox.parametrize('torch', [nox.param(torch, id=f'torch-{torch[:-2]}') for torch in SETS])
def original(session: nox.Session, torch: str) -> None:
    """mmengine 0.10.7, mmcv 2.1.0, mmdet 3.3.0, mmsegmentation 1.2.2, mmpretrain 1.2.0."""
    install(session, torch)
    shutil.rmtree(session.create_tmp())  # what an earlier session resumed is no proof for this one
    session.chdir(session.create_tmp())  # data and runs lie there, and vim_mm is the installed one
    shutil.copytree(ROOT / 'tests', 'tests')  # beside the checkout's vim_mm they would import that
    session.run('python', '-m', 'pytest', '-q', *TESTS)
    session.run('python', '-m', 'vim_mm.doctor')
    session.run('python', '-m', 'vim_mm.datasets.shapes', '--train', '64', '--val', f'{VALIDATED}')
    session.run('python', '-m', 'vim_mm.datasets.fashion', '--only', 'classes')
    for config in session.posargs or CONFIGS:
        train(session, ROOT / 'configs' / config)


def install(session: nox.Session, torch: str) -> None:
    """The set, mmcv compiled against its torch, and this package."""
    torchvision, build = SETS[torch]
    # As in the Makefile: CUDA for the visible GPUs alone, and not at all where there is none.
    gpus = subprocess.check_output([ROOT / 'tools/dev/gpu_architectures.sh'], text=True).strip()
    os.environ.setdefault(*(('TORCH_CUDA_ARCH_LIST', gpus) if gpus else ('VIM_MM_BUILD_CUDA', '0')))
    session.install(f'torch=={torch}', f'torchvision=={torchvision}')
    session.install('-r', REQUIREMENTS / 'original.txt')
    session.install('--no-deps', '-r', REQUIREMENTS / 'original-no-deps.txt')
    # What mmcv 2.1.0 is built with; MMEngine needs pkg_resources too, which 80 still has.
    session.install('setuptools==69.5.1', 'wheel', 'ninja')
    session.run(
        'python',
        ROOT / 'tools/dev/install_mmcv.py',
        '--with-ops',
        env={'VIM_MM_MMCV': 'mmcv==2.1.0'},
    )
    session.install('setuptools==80.9.0')
    session.install('--no-deps', '--no-build-isolation', ROOT, env={'VIM_MM_BUILD': build})


def train(session: nox.Session, config: Path) -> None:
    """Train, resume and test one config; VimRunner says from which iteration it resumed."""
    work_dir = Path('work_dirs') / config.stem

    def run(iterations: int, *options: str) -> None:
        session.run(
            'python', ROOT / 'tools/train.py', config, '--work-dir', work_dir, *options,
            '--cfg-options', f'train_cfg.max_iters={iterations}', f'train_cfg.val_interval={HALF}',
            f'default_hooks.checkpoint.interval={HALF}', 'default_hooks.logger.interval=1',
            f'val_dataloader.dataset.indices={VALIDATED}',
        )  # fmt: skip

    run(HALF)
    run(WHOLE, '--resume')
    logs = ''.join(log.read_text() for log in work_dir.glob('*/*.log'))
    if f'iter: {HALF}' not in logs:
        session.error(f'{config.name} was not resumed at iteration {HALF}')
    session.run(
        'python', ROOT / 'tools/test.py', config, work_dir / f'iter_{WHOLE}.pth',
        '--cfg-options', f'test_dataloader.dataset.indices={VALIDATED}',
    )  # fmt: skip
    times = re.findall(r'Iter\(train\).* time: ([\d.]+)', logs)
    session.log(f'{config.name}: {1 / statistics.median(map(float, times)):.3f} iterations/s')
