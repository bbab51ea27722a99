"""benchmarks/benchmark_hook.py takes a hook out of a training block by block, and puts it back."""

import json
from types import SimpleNamespace

import pytest
from mmengine.hooks import Hook

from tests.scripts import load
from tests.tools.conftest import configs, data_root, run_tool  # noqa: F401  fixtures


@pytest.fixture(scope='module')
def tool():
    return SimpleNamespace(**load('benchmarks/benchmark_hook.py'))


class Counted(Hook):
    """Notes the iterations that it saw."""

    def __init__(self):
        self.seen = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.seen.append(batch_idx)


def test_the_hook_is_there_in_every_other_block(tool):
    counted = Counted()
    switch = tool.Switch('Counted', warmup=2, block=3)
    runner = SimpleNamespace(_hooks=[counted, switch], hooks=[counted, switch])
    switch.before_train(runner)
    for i in range(2 + 4 * 3):
        for hook in runner._hooks:
            hook.after_train_iter(runner, i)
    assert counted.seen == [0, 1, 2, 3, 4, 8, 9, 10]
    assert len(switch.blocks) == 4


def test_an_unknown_hook_is_named(tool):
    switch = tool.Switch('NoSuchHook', warmup=2, block=3)
    with pytest.raises(SystemExit, match="expected one of Counted, got 'NoSuchHook'"):
        switch.before_train(SimpleNamespace(hooks=[Counted()]))


@pytest.mark.slowest
def test_a_training_gives_pairs_of_blocks(configs, data_root, tmp_path):  # noqa: F811
    table = run_tool(
        'benchmarks/benchmark_hook.py', configs['seg'], 'NonFiniteLossHook',
        '--pairs', 2, '--block', 1, '--warmup', 1, '--out', tmp_path / 'cost.json',
        '--cfg-options', f'data_root={data_root}', cwd=tmp_path,
    )  # fmt: skip
    assert 'NonFiniteLossHook' in table
    assert json.loads((tmp_path / 'cost.json').read_text())['pairs'] == 2
