"""The number of loader workers fits the cores and the shared memory."""

import pytest
import torch
from torch.utils.data import TensorDataset
from torch.utils.data._utils.pin_memory import pin_memory

from vim_mm.engine.batches import loading
from vim_mm.engine.batches.loading import fit_workers, fitting_workers, sample_bytes

MIB = 1 << 20


@pytest.mark.parametrize(
    ('asked', 'batch', 'cores', 'memory', 'processes', 'expected'),
    [
        pytest.param(4, 1 * MIB, 16, 1000 * MIB, 1, 4, id='all fit'),
        pytest.param(8, 1 * MIB, 16, 1000 * MIB, 8, 2, id='cores are shared'),
        pytest.param(8, 1 * MIB, 2, 1000 * MIB, 8, 1, id='at least one'),
        # ADE20K: two crops of 512 x 512, their labels in 64 bits.
        pytest.param(4, 5 * MIB, 16, 64 * MIB, 1, 1, id='container'),
        pytest.param(4, 5 * MIB, 16, 128 * MIB, 2, 1, id='container for two'),
        pytest.param(8, 24 * MIB, 16, 64 * MIB, 1, 0, id='batch of COCO in a container'),
        pytest.param(0, 1, 16, 1000 * MIB, 1, 0, id='none asked'),
    ],
)
def test_workers(asked, batch, cores, memory, processes, expected):
    assert fitting_workers(asked, batch, cores, memory, processes) == expected


def test_the_loaders_of_training_and_validation_share():
    workers = [fitting_workers(8, batch * MIB, 64, 64 * MIB, 1) for batch in (1, 2)]
    assert workers == [5, 2]
    waiting = sum(3 * n * batch for n, batch in zip(workers, (1, 2)))
    assert waiting <= 64 / 2


def test_bytes_of_a_sample():
    sample = dict(inputs=torch.zeros(3, 4, 4, dtype=torch.uint8), data=[torch.zeros(2), 'text'])
    assert sample_bytes(sample) == 48 + 8


def test_the_machine_is_asked(monkeypatch):
    dataset = TensorDataset(torch.zeros(4, MIB))
    monkeypatch.setattr(loading.os, 'sched_getaffinity', lambda _: range(16))
    usage = type('Usage', (), dict(free=64 * MIB))
    monkeypatch.setattr(loading.shutil, 'disk_usage', lambda _: usage)
    monkeypatch.delenv('LOCAL_WORLD_SIZE', raising=False)
    workers, note = fit_workers(8, 1, dataset)
    assert workers == 1
    assert '1 loader workers instead of 8' in note and '64 MiB of /dev/shm' in note
    assert fit_workers(1, 1, dataset) == (1, None)
    usage.free = 64 << 30
    monkeypatch.setattr(loading.os, 'sched_getaffinity', lambda _: range(4))
    monkeypatch.setenv('LOCAL_WORLD_SIZE', '2')
    workers, note = fit_workers(8, 1, dataset)
    assert workers == 2 and note.endswith('There are 4 cores shared by 2 processes.')


def test_samples_are_pinned_with_their_tensors(monkeypatch):
    """Without a GPU nothing can be pinned: the tensors are marked."""
    from mmengine.structures import BaseDataElement, InstanceData, PixelData

    from vim_mm.engine.batches.loading import pin_samples

    pin_samples()
    monkeypatch.setattr(torch.Tensor, 'pin_memory', lambda x: x + 100)
    sample = BaseDataElement(metainfo=dict(img_path='a.png'), note='x')
    sample.gt_sem_seg = PixelData(data=torch.zeros(1, 2, 2))
    sample.gt_instances = InstanceData(bboxes=torch.zeros(3, 4), names=['a', 'b', 'c'])
    batch = dict(inputs=[torch.zeros(3, 2, 2)], data_samples=[sample])
    (pinned,) = pin_memory(batch)['data_samples']
    assert type(pinned) is BaseDataElement
    assert pinned.img_path == 'a.png' and pinned.note == 'x'
    assert (pinned.gt_sem_seg.data == 100).all() and (pinned.gt_instances.bboxes == 100).all()
    assert pinned.gt_instances.names == ['a', 'b', 'c']
    assert (sample.gt_sem_seg.data == 0).all()
