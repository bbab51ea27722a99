"""What a loader's worker sends arrives as its collate function made it, in one piece of memory."""

import pickle
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.dataset import pseudo_collate
from mmengine.structures import BaseDataElement
from torch.utils.data import DataLoader

from vim_mm.engine.batches.transport import SharedBatches

BFLOAT16 = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)


def sample(index):
    """What samples hold: by index, so that no two are equal."""
    element = BaseDataElement(metainfo=dict(path=f'{index}.png', scale=np.float32(0.5)))
    element.labels = torch.arange(5) + index
    element.inner = BaseDataElement(boxes=torch.rand(index, 4))  # the first has none
    grid = np.arange(24, dtype=np.int16).reshape(4, 6) + index
    twice = torch.full((3,), index)
    return dict(
        image=torch.full((3, 160, 160), index, dtype=torch.uint8),
        masks=np.full((4, 170, 170), index, np.uint8)[:, :160, 10:],  # cropped
        element=element,
        tensors=[
            BFLOAT16 + index,
            torch.tensor(index),
            torch.tensor([True, False]),
            torch.arange(3) * (1 + 2j),
            (torch.arange(3) * (1 + 2j)).conj(),
            torch.empty(0, 4),
            torch.arange(12).reshape(3, 4).t(),
            torch.ones(2, 3).to_sparse(),
            torch.ones(1).expand(4),
        ],
        arrays=[
            grid,
            np.asfortranarray(grid),
            grid[:, ::2],
            np.array('text'),
            np.array([index, None], dtype=object),
            np.zeros((0, 3)),
            np.array(['2026-11-27'], dtype='datetime64[D]'),
            np.array([(1, 2.5)], dtype=[('a', 'i4'), ('b', '>f8')]),
        ],
        twice=[twice, twice],
        others=(index, None, 'text', {index}),
    )


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        torch.manual_seed(index)
        return sample(index)


def batches(workers, collate=pseudo_collate, **options):
    loader = DataLoader(
        Samples(), 3, num_workers=workers, collate_fn=SharedBatches(collate), **options
    )
    return list(loader)


def assert_equal(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.layout) == (other.dtype, other.shape, other.layout)
        assert torch.equal(one.to_dense(), other.to_dense())
        if one.layout is torch.strided:
            assert one.stride() == other.stride() or one.numel() < 2
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        assert one.flags.f_contiguous == other.flags.f_contiguous
        assert np.array_equal(one, other)
        assert one.flags.writeable == other.flags.writeable
    elif isinstance(one, BaseDataElement):
        assert_equal(one.metainfo, other.metainfo)
        assert_equal(dict(one.items()), dict(other.items()))
    elif isinstance(one, dict):
        assert one.keys() == other.keys()  # MMEngine orders some by a set
        assert_equal([one[key] for key in other], [*other.values()])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    else:
        assert one == other


@pytest.mark.parametrize('context', ['fork', pytest.param('spawn', marks=pytest.mark.slow)])
def test_batches_arrive_as_they_were_collated(context):
    assert_equal(batches(2, multiprocessing_context=context), batches(0))


def test_without_workers_the_collate_function_is_all_there_is():
    given = [object()]
    assert SharedBatches(lambda samples: samples)(given) is given


def mapping(values):
    """The mapping of shared memory that holds a tensor or an array; None if it is not shared."""
    address = values.ctypes.data if isinstance(values, np.ndarray) else values.data_ptr()
    for line in Path('/proc/self/maps').read_text().splitlines():
        begin, end = (int(each, 16) for each in line.split()[0].split('-'))
        if begin <= address < end:
            return (begin, end) if line.split()[1].endswith('s') else None
    raise AssertionError('no address of this process')


def test_large_tensors_and_arrays_lie_in_one_piece_of_shared_memory():
    (batch, other) = batches(1)
    (memory,) = {mapping(values) for values in (*batch['image'], *batch['masks'])}
    assert memory is not None
    assert mapping(other['image'][0]) not in (None, memory)


def test_small_values_do_not_keep_the_memory_of_their_batch():
    batch, _ = batches(1)
    kept = batch['element'][1].labels, batch['arrays'][0][0]
    assert [mapping(values) for values in kept] == [None, None]


def test_each_tensor_is_one_by_itself():
    batch, _ = batches(1)
    first, second, _ = batch['image']
    assert deepcopy(first).untyped_storage().nbytes() == first.nbytes
    assert len(pickle.dumps(first)) < 1.1 * first.nbytes
    weight = torch.ones(first.shape, requires_grad=True)
    loss = (weight * first).sum()
    second += 1  # which the gradient does not read
    loss.backward()
    with pytest.raises(RuntimeError, match='resize'):
        first.resize_(2 * first.numel())


def test_what_is_in_a_batch_twice_arrives_as_one():
    for batch in batches(1):
        first, second = (each[0] for each in batch['twice'])
        assert first is second


def test_values_may_be_written_to_and_do_not_overlap():
    batch, _ = batches(1)
    for tensor in batch['image']:
        tensor.fill_(9)
    batch['arrays'][0][1][:] = 7
    expected = batches(0)[0]
    assert_equal(batch['element'], expected['element'])
    assert_equal(batch['arrays'][0][2], expected['arrays'][0][2])


@pytest.mark.parametrize('faulty', ['collate', 'pickle'])
def test_an_error_on_the_way_ends_the_loop(faulty):
    def collate(samples):
        if faulty == 'collate':
            raise ValueError('no batch of these')
        return [lambda: 1]  # which no process can send

    with pytest.raises(Exception, match=r'no batch of these|pickle'):
        batches(1, collate, timeout=60)
