"""`make` builds for the GPU that is visible and for no other."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
SHOW = 'show: ; @echo "$$VIM_MM_BUILD_CUDA $$TORCH_CUDA_ARCH_LIST"'


def settings(folder: Path, capabilities: str | None, **environment: str) -> str:
    """What a recipe of the Makefile sees, on a machine whose nvidia-smi prints this."""
    for name in ('sh', 'awk', 'grep', 'sort', 'paste', 'find', 'make', 'cat'):
        (folder / name).symlink_to(shutil.which(name))
    if capabilities is not None:
        program = folder / 'nvidia-smi'
        program.write_text(f'#!/bin/sh\ncat <<END\n{capabilities}\nEND\n')
        program.chmod(0o755)
    done = subprocess.run(
        ['make', '--no-print-directory', '--eval', SHOW, 'show'],
        cwd=ROOT,
        env={'PATH': str(folder), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.rstrip('\n')


@pytest.mark.parametrize(
    ('capabilities', 'environment', 'expected'),
    [
        pytest.param(None, {}, '0 ', id='no-driver'),
        pytest.param('No devices were found', {}, '0 ', id='no-gpu'),
        pytest.param('9.0', {}, ' 9.0', id='one-gpu'),
        pytest.param('9.0\n8.9\n9.0', {}, ' 8.9;9.0', id='two-kinds'),
        pytest.param('9.0', {'CUDA_VISIBLE_DEVICES': ''}, '0 ', id='hidden'),
        pytest.param('9.0', {'CUDA_VISIBLE_DEVICES': '0'}, ' 9.0', id='chosen'),
        pytest.param(None, {'VIM_MM_BUILD_CUDA': '1'}, '1 ', id='build-overridden'),
        pytest.param('9.0', {'TORCH_CUDA_ARCH_LIST': '8.0'}, ' 8.0', id='arch-overridden'),
    ],
)
def test_cuda_only_for_the_visible_gpu(tmp_path, capabilities, environment, expected):
    assert settings(tmp_path, capabilities, **environment) == expected


def test_help_names_every_command():
    done = subprocess.run(['make'], cwd=ROOT, capture_output=True, text=True, check=True)
    for target in ('demo', 'demo-det', 'test', 'lint', 'format', 'clean'):
        assert f'make {target} ' in done.stdout


def test_pre_commit_hooks_are_valid_and_local():
    config = yaml.safe_load((ROOT / '.pre-commit-config.yaml').read_text())
    for repository in config['repos']:
        assert repository['repo'] == 'local'
        for hook in repository['hooks']:
            program = hook['entry'].split()[0]
            assert program.startswith('.venv/bin/')
            assert f'{Path(program).name}==' in (ROOT / 'requirements/dev.txt').read_text()


def test_requirements_are_exact_and_name_no_host():
    for file in (ROOT / 'requirements').glob('*.txt'):
        for line in file.read_text().splitlines():
            if not line.startswith('#'):
                requirement = Requirement(line)
                (specifier,) = requirement.specifier
                assert (specifier.operator, requirement.url) == ('==', None), f'{file}: {line}'


def test_lock_agrees_with_the_requirements():
    lock = {
        line.partition(' ;')[0].strip()
        for line in (ROOT / 'requirements/lock.txt').read_text().splitlines()
    }
    for name in ('build', 'runtime', 'mm', 'tests', 'dev'):
        wanted = set((ROOT / f'requirements/{name}.txt').read_text().split())
        assert wanted <= lock, f'make lock: {wanted - lock}'
