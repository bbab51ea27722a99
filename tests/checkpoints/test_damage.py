"""Files that are damaged, or claim more than they hold: one sentence with the name of the file."""

import codecs
import io
import pickle
import random
import resource
import struct
import time
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer
from safetensors.torch import save_file
from torch.serialization import MAGIC_NUMBER

from tests.checkpoints.bombs import RECONSTRUCT, Built, Call
from tests.engine.toy import ToyModel, make_runner
from vim_mm.checkpoints import NotACheckpointError, UnsafeCheckpointError, read_file
from vim_mm.checkpoints.reading import NonFiniteWeightsError, load_from_local

REFUSALS = (NotACheckpointError, UnsafeCheckpointError, NonFiniteWeightsError)


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory) -> Path:
    """What the runner writes."""
    work_dir = tmp_path_factory.mktemp('trained')
    make_runner(work_dir).train()
    return work_dir / 'iter_2.pth'


def formats(checkpoint: Path, folder: Path) -> dict[str, bytes]:
    """The same weights in each format."""
    content = torch.load(checkpoint, weights_only=False)
    weights = content['state_dict']
    torch.save(content, folder / 'legacy', _use_new_zipfile_serialization=False)
    save_file({k: v.contiguous() for k, v in weights.items()}, folder / 'safetensors')
    arrays = {k: v.numpy() for k, v in weights.items()}
    (folder / 'pickle').write_bytes(pickle.dumps(dict(model=arrays), protocol=4))
    return {'zip': checkpoint.read_bytes()} | {
        name: (folder / name).read_bytes() for name in ('legacy', 'safetensors', 'pickle')
    }


def damage(content: bytes, dice: random.Random) -> bytes:
    """Flipped bits, a hole, or an early end."""
    damaged, place = bytearray(content), dice.randrange(len(content))
    kind = dice.choice(('bit', 'bits', 'hole', 'cut', 'more'))
    if kind == 'cut':
        return content[:place]
    if kind == 'hole':
        damaged[place : place + 512] = bytes(len(damaged[place : place + 512]))
    elif kind == 'more':
        damaged[place:place] = dice.randbytes(5)
    for _ in range({'bit': 1, 'bits': 20}.get(kind, 0)):
        damaged[dice.randrange(len(damaged))] ^= 1 << dice.randrange(8)
    return bytes(damaged)


def test_damage_is_named_or_does_no_harm(checkpoint, tmp_path):
    dice, file, refused = random.Random(0), tmp_path / 'damaged.pth', Counter()
    weights = torch.load(checkpoint, weights_only=False)['state_dict']
    for name, content in formats(checkpoint, tmp_path).items():
        for _ in range(60):
            file.write_bytes(damage(content, dice))
            try:
                loaded = load_from_local(str(file))
            except ValueError as error:  # also of a file that is no Vim any more
                assert type(error).__module__.startswith('vim_mm'), error
                assert 'damaged.pth' in str(error) and '\n' not in str(error)
                refused[name] += 1
            except UnsafeCheckpointError as error:
                assert 'damaged.pth' in str(error) and '\n' not in str(error)
                refused[name] += 1
            else:
                if name == 'zip':  # its checksums tell each changed weight
                    for key, weight in weights.items():
                        assert torch.equal(loaded['state_dict'][key], weight)
    assert min(refused[name] for name in ('zip', 'legacy', 'safetensors', 'pickle')) >= 15


def test_a_flipped_bit_of_a_weight_is_named(tmp_path):
    file = tmp_path / 'weights.pth'
    torch.save(dict(weight=torch.full((64,), 1.5)), file)
    content = bytearray(file.read_bytes())
    content[content.index(np.float32(1.5).tobytes() * 64) + 130] ^= 1
    file.write_bytes(content)
    assert not torch.equal(torch.load(file)['weight'], torch.full((64,), 1.5))
    with pytest.raises(NotACheckpointError, match=r'weights\.pth is a damaged checkpoint: .*CRC'):
        read_file(file)


def test_every_record_is_verified(checkpoint, tmp_path):
    """Also one that no tensor refers to."""
    file = tmp_path / 'more.pth'
    file.write_bytes(checkpoint.read_bytes())
    with zipfile.ZipFile(file, 'a') as archive:
        folder = archive.namelist()[0].partition('/')[0]
        archive.writestr(f'{folder}/data/unused', b'0123456789' * 9)
    assert read_file(file)['meta']['iter'] == 2
    file.write_bytes(file.read_bytes().replace(b'0123456789' * 9, b'0123456788' * 9))
    with pytest.raises(NotACheckpointError, match='CRC'):
        read_file(file)


def rewritten(content: dict, before: bytes, after: bytes, **options) -> bytes:
    """A file of torch.save with other bytes in its pickle; its checksums are right."""
    whole = io.BytesIO()
    torch.save(content, whole, **options)
    if options:
        assert before in whole.getvalue()
        return whole.getvalue().replace(before, after)
    written = io.BytesIO()
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(written, 'w') as new:
        for record in old.infolist():
            part = old.read(record)
            if record.filename.endswith('data.pkl'):
                assert before in part
                part = part.replace(before, after)
            new.writestr(record.filename, part)
    return written.getvalue()


SEVEN, MANY = b'K\x07', b'J\xff\xff\xff\x7f'  # numbers in a pickle
LEGACY = dict(_use_new_zipfile_serialization=False)


def saved(content: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def compressed() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, 'w', zipfile.ZIP_DEFLATED) as archive:
        archive.writestr('a/data.pkl', bytes(2**28))
    return file.getvalue()


def doubled(levels: int) -> list:
    """A list that written out has 2^levels entries, and in a file a few for each level."""
    made = [1]
    for _ in range(levels):
        made = [made, made]
    return made


def pickled(*parts: object) -> bytes:
    return b''.join(pickle.dumps(part, protocol=2) for part in parts)


def calls(function: Callable, *arguments: object) -> list[Call]:
    """Many, of the same arguments."""
    return [Call(function, *arguments) for _ in range(4000)]


def as_keys(value: bytes, times: int) -> bytes:
    """A dict that has one value as its key again and again; the value in opcodes."""
    return b'\x80\x02}' + value + b'q\0Ns' + b'h\0Ns' * times + b'.'


FROMBUFFER = np.ones(1).__reduce_ex__(5)[0]
STATE = (1, (2**16,), np.dtype('u1'), False, bytes(2**16))  # of an array
GREEDY = {
    'shared': pickled(dict(meta=dict(iter=doubled(26)))),
    'shared note': pickled(dict(meta=dict(vim_mm=dict(backbones=dict(a=dict(b=doubled(26))))))),
    'shared text': pickled(dict(meta=dict(config=['a' * 10000] * 10000))),
    'shared, as a name': pickled(dict(a=Call(getattr, HistoryBuffer, doubled(26)))),
    'shared, as a dtype': pickled(dict(a=Call(np.dtype, doubled(26)))),
    'shared, before torch 1.6': pickled(
        MAGIC_NUMBER, 1001, dict(little_endian=True), {}, [doubled(30), doubled(30)]
    ),
    'index of the memo': b'\x80\x04Nr\xff\xff\xff\x1f.',
    'bytearray': b'\x80\x05\x96' + struct.pack('<Q', 2**33) + b'.',
    'bytes': b'\x80\x05\x8e' + struct.pack('<Q', 2**40) + b'.',
    'frame': b'\x80\x05\x95' + struct.pack('<Q', 2**40) + b'N.',
    'integer': b'\x80\x05\x8b' + struct.pack('<i', 2**31 - 1) + b'.',
    'calls of one array': pickled(
        dict(a=calls(FROMBUFFER, bytes(2**16), np.dtype('u1'), (2**16,), 'C'))
    ),
    'calls of one text': pickled(dict(a=calls(codecs.encode, 'a' * 2**16, 'latin1'))),
    'calls of one list': pickled(dict(a=calls(OrderedDict, [(i, i) for i in range(1000)]))),
    'states of one array': pickled(
        dict(a=[Built(RECONSTRUCT, (np.ndarray, (0,), b'b'), STATE) for _ in range(4000)])
    ),
    'expanded': saved(dict(w=torch.ones(1).expand(40000, 40000))),
    'overlapping': saved(dict(w=torch.ones(4000).as_strided((2000, 2000), (1, 1)))),
    'storage': rewritten(dict(w=torch.ones(7)), SEVEN, MANY),
    'storage, before torch 1.6': rewritten(dict(w=torch.ones(7)), SEVEN, MANY, **LEGACY),
    'tensor': rewritten(dict(w=torch.ones(8, 1)[:7]), SEVEN, MANY),
    'compressed': compressed(),
    'nested': b'\x80\x02}X\x01\x00\x00\x00w' + b']' * 30000 + b'a' * 29999 + b's.',
    'itself': b'\x80\x02}q\x00X\x01\x00\x00\x00wh\x00s.',
    'one integer as keys': as_keys(b'\x8b' + struct.pack('<i', 2**20) + b'\1' * 2**20, 2**18),
    'one tuple as keys': as_keys(b'(' + b'K\x01' * 20000 + b't', 20000),
    'tuples as a key': b'\x80\x04})' + b'2\x86' * 60 + b'Ns.',
}


@pytest.mark.parametrize('what', GREEDY)
def test_a_small_file_takes_little_memory(what, tmp_path):
    (tmp_path / 'greedy.pth').write_bytes(GREEDY[what])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    with pytest.raises(REFUSALS, match=r'greedy\.pth'):
        read_file(tmp_path / 'greedy.pth')
    assert time.process_time() < began + 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 100_000  # KB


@pytest.mark.parametrize('content', [[1], 3, None, 'text', (1,), torch.ones(2)], ids=repr)
def test_a_file_without_a_dict_is_named(content, tmp_path):
    torch.save(content, tmp_path / 'odd.pth')
    kind = 'None' if content is None else type(content).__name__
    with pytest.raises(NotACheckpointError, match=rf'odd\.pth is no checkpoint: it holds .*{kind}'):
        load_from_local(str(tmp_path / 'odd.pth'))


def changed(checkpoint: Path, file: Path, *places: str, value: object) -> Path:
    content = torch.load(checkpoint, weights_only=False)
    *parts, last = places
    part = content
    for name in parts:
        part = part[name]
    part[last] = value
    torch.save(content, file)
    return file


@pytest.mark.parametrize(
    ('places', 'value', 'message'),
    [
        (('meta', 'iter'), -1, r'meta\.iter must be a whole number from 0, got -1'),
        (('meta', 'iter'), '2', r"meta\.iter must be a whole number from 0, got '2'"),
        (('meta', 'iter'), True, r'meta\.iter must be a whole number from 0, got True'),
        (('meta', 'epoch'), 0.5, r'meta\.epoch must be a whole number from 0, got 0\.5'),
        (('meta', 'epoch'), 10**30, r'meta\.epoch must be a whole number from 0'),
        (('meta', 'seed'), -1, r'meta\.seed is -1'),
        (('meta', 'seed'), [1], r'meta\.seed is a list'),
        (('meta', 'started_from'), 'a.pth', r'meta\.started_from must be a dict, got a str'),
        (('meta', 'vim_mm'), 3, r'meta\.vim_mm must be a dict, got a int'),
        (('meta',), [1], 'meta must be a dict, got a list'),
        (('meta',), None, 'meta must be a dict, got a NoneType'),
        (('message_hub',), [], 'message_hub must be a dict'),
        (('message_hub', 'runtime_info', 'iter'), -5, r'runtime_info\.iter must be a whole number'),
        (('message_hub', 'log_scalars'), 1, r'message_hub\.log_scalars must be a dict'),
        (('optimizer',), [1], 'optimizer must be a dict'),
        (('param_schedulers',), 'none', 'param_schedulers must be a list'),
        (('state_dict',), [torch.ones(1)], 'state_dict must be a dict'),
        (('state_dict', 3), torch.ones(1), '3 is no name of a weight'),
    ],
)
def test_a_part_of_another_kind_is_named(places, value, message, checkpoint, tmp_path):
    file = changed(checkpoint, tmp_path / 'odd.pth', *places, value=value)
    with pytest.raises(NotACheckpointError, match=rf'odd\.pth cannot be used: .*{message}'):
        load_from_local(str(file))


@pytest.mark.parametrize('lacking', ['meta', 'message_hub', 'iter'])
def test_a_file_without_the_state_of_a_training_is_not_resumed(lacking, checkpoint, tmp_path):
    content = torch.load(checkpoint, weights_only=False)
    del (content['meta'] if lacking == 'iter' else content)[lacking]
    torch.save(content, tmp_path / 'weights.pth')
    with pytest.raises(NotACheckpointError, match=rf'weights\.pth cannot be resumed: .*{lacking}'):
        make_runner(tmp_path, load_from=str(tmp_path / 'weights.pth'), resume=True).train()


def test_weights_alone_are_not_resumed(tmp_path):
    torch.save(ToyModel().state_dict(), tmp_path / 'weights.pth')
    with pytest.raises(NotACheckpointError, match='give it as load_from, without --resume'):
        make_runner(tmp_path, load_from=str(tmp_path / 'weights.pth'), resume=True).train()


@pytest.mark.parametrize('text', ['9' * 5000, '-3', 'two', '', '\0'])
def test_a_note_of_no_validation_is_a_warning(text, checkpoint, tmp_path):
    (tmp_path / 'last_validation').write_text(text)
    make_runner(tmp_path, load_from=str(checkpoint), resume=True).train()
    (log,) = tmp_path.glob('*/*.log')
    assert 'last_validation holds no number' in log.read_text()


@pytest.mark.parametrize(
    ('name', 'value'),
    [
        ('grid', (0, 4)),
        ('grid', 'x'),
        ('grid', (3, 3)),
        ('cls_token', 'nowhere'),
        ('arch', 'tiny'),
        ('out_indices', 3),
        ('if_rope', 1),
    ],
)
def test_a_wrong_note_of_the_backbone_is_named(name, value, tmp_path):
    state = ToyModel().state_dict()
    state._metadata['backbone'][name] = value
    torch.save(state, tmp_path / 'noted.pth')
    with pytest.raises((RuntimeError, ValueError), match=rf'noted\.pth: .*{name}'):
        make_runner(tmp_path, load_from=str(tmp_path / 'noted.pth')).train()


def test_what_files_of_torch_hold_is_read_as_it_was(tmp_path):
    """Dtypes, views, parameters, sizes and what schedules keep, in both formats."""
    base = torch.arange(24.0).reshape(2, 3, 4)
    marked = torch.nn.Parameter(torch.ones(2))
    marked.note = 'an attribute'
    content = dict(
        transposed=base.permute(2, 0, 1),
        part=base[1, :, ::2],
        tied=base.view(-1),
        empty=torch.empty(0, 3),
        number=torch.tensor(3),
        parameter=torch.nn.Parameter(torch.ones(2)),
        marked=marked,
        size=base.shape,
        device=torch.device('cuda', 1),
        dtype=torch.bfloat16,
        milestones=Counter({2: 1, 5: 2}),
        ordered=OrderedDict(a=1),
        others=(1, 2.5, 'text', b'bytes', None, True, {1, 2}, frozenset((3,)), 1j),
        **{str(dtype): torch.ones(3).to(dtype) for dtype in (torch.half, torch.bfloat16)},
        **{str(dtype): torch.ones(3).to(dtype) for dtype in (torch.bool, torch.int8, torch.long)},
        **{str(dtype): torch.ones(3).to(dtype) for dtype in (torch.float8_e5m2, torch.uint16)},
    )
    for options in ({}, LEGACY):
        torch.save(content, tmp_path / 'file.pth', **options)
        read = read_file(tmp_path / 'file.pth')
        assert read.pop('size') == (2, 3, 4) and read.pop('device') == 'cuda:1'
        for name, value in read.items():
            if isinstance(value, torch.Tensor):
                assert type(value) is torch.Tensor and not value.requires_grad
                assert value.dtype == content[name].dtype and not vars(value)
                assert value.stride() == content[name].stride()
                assert torch.equal(value.double(), content[name].detach().double())
            else:
                assert value == content[name] and type(value) is type(content[name])
        read['tied'][:] = 7
        assert (read['transposed'] == 7).all()


def test_an_order_of_torch_in_the_notes_is_not_followed(tmp_path):
    """load_state_dict(assign=True) leaves one in the notes of the weights that it was given."""
    first, second = ToyModel(), ToyModel()
    state = first.state_dict()
    ToyModel().load_state_dict(state, assign=True)
    assert state._metadata['head']['assign_to_params_buffers']
    torch.save(state, tmp_path / 'weights.pth')
    weight = second.head.weight
    second.load_state_dict(read_file(tmp_path / 'weights.pth'))
    assert second.head.weight is weight
    assert torch.equal(weight, first.head.weight)


def test_a_message_is_one_line_whatever_the_file_holds(tmp_path):
    file = tmp_path / 'named.pth'
    file.write_bytes(b'\x80\x04\x8c\x01a\x8c\x0cb\n\x1b[31mred\x07\x00\x93.')
    with pytest.raises(UnsafeCheckpointError) as caught:
        read_file(file)
    assert str(caught.value).isprintable()
