"""Between dataset and loader: samples drawn reproducibly, and faulty ones named by their files."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from traceback import walk_tb

import torch
from mmengine.logging import print_log
from mmengine.registry import DATASETS
from mmengine.structures import BaseDataElement
from torch import nn
from torch.utils.data import DataLoader, Dataset

from vim_mm.engine.batches.batch import Steps
from vim_mm.engine.batches.files import is_cut_off, why_unreadable, wrapped_label
from vim_mm.engine.batches.loading import fit_workers
from vim_mm.engine.batches.randomness import NumberedIndex, seed_sample
from vim_mm.engine.batches.transport import SharedBatches
from vim_mm.errors import UserError

# What the heads of MMSegmentation ignore unless they are told another.
IGNORED_LABEL = 255


class SampleError(UserError, RuntimeError):
    """A picture or an annotation cannot be used; the message begins with its file."""


@DATASETS.register_module()
class CheckedDataset(Dataset):
    """Another dataset, each sample of which is drawn from its own seed and checked.

    All other attributes are those of the dataset.

    Args:
        dataset (Mapping): Config of the dataset.
        seed (int, optional): Of the run. None leaves random numbers as they are.
        ignored (Sequence[int]): Labels of pixels that are of no class.

    Attributes:
        truth (Sequence[str]): Names, one of which a data sample must have, such as 'gt_label'.

    Raises:
        SampleError: The annotations of the whole dataset cannot be read.
    """

    def __init__(
        self, dataset: Mapping, seed: int | None, ignored: Sequence[int] = (IGNORED_LABEL,)
    ):
        self.seed, self.ignored = seed, ignored
        self.truth: Sequence[str] = ()
        try:
            self.dataset = DATASETS.build(dataset)
            if hasattr(self.dataset, 'full_init'):
                self.dataset.full_init()
        except Exception as error:
            inner = _being_read(error)
            if inner is None or isinstance(error, OSError | ImportError):
                raise
            raise SampleError(f'{_place(inner)}: {_why_unread(error, inner)}') from error
        self._labels_in_8_bits = any(
            getattr(getattr(load, '_load_seg_map', None), '__module__', '').startswith('mmseg.')
            for inner, _ in leaves(self.dataset, '')
            for load in loading_transforms(inner)
        )

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str):
        if name == 'dataset':  # not there yet while this is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, index: int):
        """The sample of that index.

        Raises:
            SampleError: A file is missing, unreadable or cut off, or a label is none of the
                classes.
        """
        if self.seed is not None and isinstance(index, NumberedIndex):
            seed_sample(self.seed, index.epoch, index.number)
        index = int(index)
        try:
            sample = self.dataset[index]
        except Exception as error:
            raise SampleError(self._describe(index, error)) from error
        paths = self._paths(index)
        for path in paths:
            if is_cut_off(path):
                raise SampleError(f'{path}: the file is cut off.')
        if problem := self._problem(sample, index):
            raise SampleError(f'{paths[-1] if paths else f"sample {index}"}: {problem}')
        return sample

    def _problem(self, sample, index: int) -> str | None:
        """What is wrong with the truth of a sample."""
        truth = sample.get('data_samples') if isinstance(sample, Mapping) else None
        if isinstance(truth, list):  # of the views of a test-time augmentation
            views = ({k: each[i] for k, each in sample.items()} for i in range(len(truth)))
            return next(filter(None, (self._problem(view, index) for view in views)), None)
        if not isinstance(truth, BaseDataElement):
            return None
        info = self._info(index)
        if self.truth and not any(_has(truth, name) for name in self.truth):
            return (
                f'the sample has no {" nor ".join(self.truth)}: its dataset or its pipeline '
                '(LoadAnnotations) gives none.'
            )
        path = info.get('seg_map_path')
        if self._labels_in_8_bits and isinstance(path, str) and (problem := wrapped_label(path)):
            return problem
        classes = classes_of(self.dataset)
        if classes is None:
            return None
        return _label_problem(sample, truth, len(classes), self.ignored, info)

    def _info(self, index: int) -> Mapping:
        get = getattr(self.dataset, 'get_data_info', None)
        return {} if get is None else get(index)

    def _paths(self, index: int) -> list[str]:
        """Files of a sample: its picture and, last, its map of labels if it has one."""
        info = self._info(index)
        paths = [info.get('img_path'), info.get('seg_map_path')]
        return [path for path in paths if isinstance(path, str)]

    def _describe(self, index: int, error: Exception) -> str:
        paths = self._paths(index)
        for path in paths:
            if reason := why_unreadable(path):
                return f'{path}: {reason}'
        # The files are pictures: then it is what a transform makes of them.
        name = ' with '.join(paths) or f'sample {index}'
        if isinstance(error, KeyError) and error.args == ('mask',):
            return f'{name}: an object of it has no segmentation, and the pipeline loads masks.'
        if isinstance(error, KeyError) and error.args:
            return (
                f'{name}: a transform asks for {error.args[0]!r}, which this sample does not have.'
            )
        return f'{name}: {type(error).__name__}: {error}'


def _being_read(error: Exception):
    """The dataset whose annotations were being read when an error came, None of another error."""
    found = None
    for frame, _ in walk_tb(error.__traceback__):
        if frame.f_code.co_name == 'full_init':
            found = frame.f_locals['self']
    return found if hasattr(found, 'ann_file') else None


def _place(dataset) -> str:
    """The annotation file of a dataset, or the folders that it lists."""
    return dataset.ann_file or ', '.join(map(str, dataset.data_prefix.values()))


def _why_unread(error: Exception, dataset) -> str:
    """Why a dataset has no samples, in words that follow its file: it is of another format."""
    if 'at least one array' in str(error):  # NumPy's, when all pictures were filtered out
        left = 'picture with an object of the classes' if dataset.ann_file else 'image'
        return f'no {left} is left.'
    if isinstance(error, KeyError) and error.args:
        return f'{type(dataset).__name__} asks for {error.args[0]!r}, which it does not have.'
    return f'{type(error).__name__}: {error}'


def _has(truth: BaseDataElement, name: str) -> bool:
    # Without annotations MMDetection packs objects that have nothing.
    return name in truth and (name != 'gt_instances' or 'labels' in truth.gt_instances)


def leaves(dataset, name: str) -> Iterator[tuple]:
    """The datasets inside of one that repeats, joins or mixes them, with their names."""
    if isinstance(dataset, CheckedDataset):  # which no config names
        yield from leaves(dataset.dataset, name)
    elif hasattr(dataset, 'datasets'):
        for i, each in enumerate(dataset.datasets):
            yield from leaves(each, f'{name}.datasets.{i}')
    elif hasattr(dataset, 'dataset'):
        yield from leaves(dataset.dataset, f'{name}.dataset')
    else:
        yield dataset, name


def classes_of(dataset) -> Sequence[str] | None:
    """The names of a dataset's classes, None where it has none."""
    return (getattr(dataset, 'metainfo', None) or {}).get('classes')


def lists_as(dataset, kind: str) -> bool:
    """Whether a dataset lists its samples by the method of the class called ``kind``."""
    load = getattr(type(dataset), 'load_data_list', None)
    return getattr(load, '__qualname__', '') == f'{kind}.load_data_list'


def loading_transforms(dataset) -> list:
    """The transforms by which the pipeline of a dataset begins, and which read its files."""
    transforms = getattr(getattr(dataset, 'pipeline', None), 'transforms', None) or []
    return [*takewhile(lambda each: type(each).__name__.startswith('Load'), transforms)]


def _label_problem(
    sample: Mapping,
    truth: BaseDataElement,
    num_classes: int,
    ignored: Sequence[int],
    info: Mapping,
) -> str | None:
    """What is wrong with the labels of a sample of segmentation, detection or classification."""
    if 'gt_label' in truth:
        return out_of_range(torch.as_tensor(truth.gt_label), num_classes)
    # A detector's semantic branch has classes of its own.
    if 'gt_sem_seg' in truth and 'gt_instances' not in truth:
        labels = truth.gt_sem_seg.data
        if labels.ndim == 3 and labels.shape[0] != 1 and labels.shape[2] in (2, 3, 4):
            return (
                f'the map of labels has {labels.shape[2]} channels; it must be a grey picture, or '
                'one with a palette.'
            )
        shape, size = tuple(labels.shape[-2:]), tuple(truth.metainfo.get('img_shape', ())[:2])
        if size and shape != size and 'inputs' in sample:
            picture = tuple(sample['inputs'].shape[-2:])
            # In testing, labels keep the size of the original picture.
            if shape not in (picture, tuple(truth.metainfo.get('ori_shape', picture)[:2])):
                return f'the map of labels has {shape} pixels, the picture {picture}.'
        for label in ignored:
            # PyTorch compares 8 bits with the lowest 8 of another number.
            if labels.dtype is not torch.uint8 or 0 <= label <= 255:
                labels = labels[labels != label]
        problem = out_of_range(labels, num_classes, info.get('reduce_zero_label'))
        if problem is None or IGNORED_LABEL in ignored:
            return problem
        return f'{problem} Of other labels the heads ignore {[*ignored] or "none"}.'
    if 'gt_instances' in truth and 'labels' in truth.gt_instances:
        boxes = truth.gt_instances.get('bboxes')
        boxes = getattr(boxes, 'tensor', boxes)
        if boxes is not None and not torch.isfinite(boxes).all():
            return 'a box is not finite.'
        return out_of_range(truth.gt_instances.labels, num_classes)
    return None


def out_of_range(labels: torch.Tensor, num_classes: int, reduced: bool | None = None) -> str | None:
    """What is wrong with labels, as the file has them if they were ``reduced`` by one.

    None is of data sets whose labels are never reduced.
    """
    if labels.numel() == 0:
        return None
    low, high = (int(x) for x in labels.aminmax())
    if low >= 0 and high < num_classes:
        return None
    value = low if low < 0 else high
    problem = f'a label is {value}, but there are {num_classes} classes, from 0.'
    if reduced and value != IGNORED_LABEL:  # which 0 and 255 of the file become
        return f'the file has the label {value + 1}; after reduce_zero_label {problem}'
    if reduced is False and value == num_classes:
        problem += ' If 0 in the files is no class, set reduce_zero_label=True.'
    return problem


def ignored_labels(model: nn.Module) -> list[int]:
    """The labels that every head of a segmentor ignores; the usual one of other models."""
    heads = [getattr(model, name, None) for name in ('decode_head', 'auxiliary_head')]
    parts = [
        part for head in heads for part in (head if isinstance(head, nn.ModuleList) else [head])
    ]
    # Without a label to ignore, the loss of masks leaves out what is no class.
    given = [
        {label} for part in parts if (label := getattr(part, 'ignore_index', None)) is not None
    ]
    return sorted(set.intersection(*given) if given else {IGNORED_LABEL})


def build_dataloader(
    build: Callable[..., DataLoader],
    dataloader: DataLoader | Mapping,
    seed: int | None,
    diff_rank_seed: bool,
) -> DataLoader | Steps:
    """Build a loader as MMEngine's runners do, with both wrappers around the config's choices.

    Batches for a GPU lie in pinned memory unless the config says otherwise: a copy from there is
    faster, and may overlap with the step before.

    Args:
        build (Callable): The runner's ``build_dataloader``.
        dataloader (DataLoader | Mapping): A finished loader is returned as it is. ``micro_batches``
            of a config, 1 by default, says how many batches a step of the optimizer has;
            ``ignored`` as in :class:`CheckedDataset`.
        seed (int, optional): Of the run.
        diff_rank_seed (bool): As in Runner.

    Raises:
        SampleError: The annotations of the whole dataset cannot be read.
    """
    if isinstance(dataloader, DataLoader):
        return build(dataloader, seed, diff_rank_seed)
    dataset, sampler = dataloader['dataset'], dataloader['sampler']
    dataloader = {**dataloader}
    counts, batch_size = dataloader.pop('micro_batches', 1), dataloader.get('batch_size', 1)
    ignored = dataloader.pop('ignored', (IGNORED_LABEL,))
    if isinstance(dataset, Mapping):
        checked = dict(type='CheckedDataset', seed=seed, ignored=ignored)
        dataloader['dataset'] = dict(**checked, dataset=dataset)
    if isinstance(sampler, Mapping):
        dataloader['sampler'] = dict(
            type='NumberedSampler',
            sampler=sampler,
            batch_size=batch_size,
            counts=counts,
            drop_last=dataloader.get('drop_last', False),
        )
    if torch.cuda.is_available():  # else PyTorch warns of it
        dataloader.setdefault('pin_memory', True)
    loader = build(dataloader, seed, diff_rank_seed)
    loader.num_workers, note = fit_workers(loader.num_workers, batch_size, loader.dataset)
    if note is not None:
        print_log(note, logger='current')
    loader.collate_fn = SharedBatches(loader.collate_fn)
    return loader if counts == 1 else Steps(loader, counts)
