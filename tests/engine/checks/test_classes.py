"""Heads with other classes than the data set are named before the first iteration."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.engine.toy import ToyModel, make_runner
from vim_mm.engine.checks.classes import ClassesHook, check_class_names, check_classes
from vim_mm.mistakes import explain


class Head(nn.Module):
    def __init__(self, num_classes, **attributes):
        super().__init__()
        self.num_classes = num_classes
        vars(self).update(attributes)


def model(path: str, head: nn.Module) -> nn.Module:
    """A model whose head has that name."""
    *parents, name = path.split('.')
    whole = module = nn.Module()
    for parent in parents:
        module.add_module(parent, nn.Module())
        module = getattr(module, parent)
    module.add_module(name, head)
    return whole


def dataset(classes: int | None, **attributes):
    names = None if classes is None else tuple(f'class {i}' for i in range(classes))
    return SimpleNamespace(metainfo=dict(classes=names), **attributes)


HEADS = [
    'decode_head', 'decode_head.0', 'auxiliary_head', 'auxiliary_head.1', 'head', 'bbox_head',
    'roi_head.bbox_head', 'roi_head.bbox_head.2', 'roi_head.mask_head', 'panoptic_head',
]  # fmt: skip


@pytest.mark.parametrize('name', HEADS)
@pytest.mark.parametrize('num_classes', [3, 150])
def test_each_head_is_compared(name, num_classes):
    check_classes(model(name, Head(7)), dataset(7), 'train_dataloader.dataset')
    with pytest.raises(ValueError) as caught:
        check_classes(model(name, Head(num_classes)), dataset(7), 'train_dataloader.dataset')
    assert str(caught.value) == (
        f'model.{name}.num_classes is {num_classes}, but train_dataloader.dataset has 7 classes '
        '(class 0, class 1, class 2, ...)'
    )


@pytest.mark.parametrize(
    ('whole', 'data'),
    [
        pytest.param(model('decode_head', Head(3)), dataset(None), id='no classes'),
        pytest.param(model('decode_head', Head(3)), SimpleNamespace(), id='no metainfo'),
        pytest.param(model('decode_head', Head(None)), dataset(7), id='no number'),
        pytest.param(model('rpn_head', Head(1)), dataset(7), id='RPN'),
        pytest.param(model('roi_head.semantic_head', Head(183)), dataset(7), id='stuff'),
        pytest.param(model('decode_head', Head(2, out_channels=1)), dataset(1), id='binary'),
        pytest.param(model('mask_head', Head(80, class_agnostic=True)), dataset(7), id='agnostic'),
        pytest.param(model('decode_head', Head(7)), dataset(7, reduce_zero_label=True), id='ADE'),
    ],
)  # fmt: skip
def test_what_is_unknown_or_meant_is_let_be(whole, data):
    check_classes(whole, data, 'train_dataloader.dataset')


def test_classes_are_those_that_remain_of_reduced_labels():
    """Else the metrics would call each class by the name of the one before."""
    data = dataset(7, reduce_zero_label=True)
    with pytest.raises(ValueError, match='is 6, but data has 7 classes after reduce_zero_'):
        check_classes(model('decode_head', Head(6)), data, 'data')


class Labelled(TensorDataset):
    metainfo = dict(classes=('a', 'b'))


@pytest.mark.parametrize('phase', ['train', 'val', 'test'])
def test_no_iteration_comes_before(phase, tmp_path):
    toy = ToyModel()
    toy.head.num_classes = 3
    calls = []
    toy.head.register_forward_hook(lambda *args: calls.append(args))
    loader = DataLoader(Labelled(torch.randn(4, 3, 8, 8)), batch_size=2)
    runner = make_runner(tmp_path, toy, **{f'{phase}_dataloader': loader})
    with pytest.raises(ValueError) as caught:
        runner.test() if phase == 'test' else runner.train()
    line = f'model.head.num_classes is 3, but {phase}_dataloader.dataset has 2 classes (a, b)'
    assert explain(caught.value) == line
    assert not calls


class Folders:
    """A data set of pictures in folders, as MMPretrain numbers them."""

    def __init__(self, *classes):
        self.metainfo = dict(classes=classes)
        self.folder_to_idx = {'disk': 0, 'square': 1}


@pytest.mark.parametrize('classes', [('disk', 'square'), ('round ones', 'others'), ('disk',)])
def test_classes_may_have_names_of_their_own(classes):
    check_class_names(Folders(*classes), 'data')


@pytest.mark.parametrize('classes', [('square', 'disk'), ('square', 'disc')])
def test_a_class_with_the_name_of_another_folder(classes):
    message = (
        r"data: the folder '\w+' has the label [01], which metainfo calls '\w+': name the classes "
        r'in the order of the folders \(disk, square\)'
    )
    with pytest.raises(ValueError, match=message):
        check_class_names(Folders(*classes), 'data')


def coco(tmp_path, *classes, **more):
    """The data set of an annotation file with the categories ball (7) and box (3), and more."""
    CocoDataset = pytest.importorskip('mmdet.datasets').CocoDataset
    box = dict(bbox=[1, 1, 4, 4], area=16, iscrowd=0, image_id=0, segmentation=[])
    content = dict(
        images=[dict(id=0, file_name='0.jpg', height=8, width=8)],
        annotations=[dict(id=1, category_id=7, **box), dict(id=2, category_id=3, **box)],
        categories=[dict(id=7, name='ball'), dict(id=3, name='box')],
        **more,
    )
    (tmp_path / 'boxes.json').write_text(json.dumps(content, indent=1))
    return CocoDataset(
        ann_file=str(tmp_path / 'boxes.json'),
        data_prefix=dict(img=''),
        metainfo=dict(classes=classes),
        pipeline=[],
    )


def test_categories_are_classes(tmp_path):
    check_class_names(coco(tmp_path, 'ball', 'box'), 'data')
    check_class_names(coco(tmp_path, 'box'), 'data')  # the others are left out on purpose


@pytest.mark.parametrize(
    'others', [[1, 2], ['x'], [], [dict(id=1, name='box'), dict(id=2, name='ball')]]
)
def test_other_lists_of_the_name_categories(others, tmp_path):
    """Files of other programs have them, of a picture or an object."""
    more = dict(categories=others)
    check_class_names(coco(tmp_path, 'ball', 'box', more=more), 'data')
    with pytest.raises(ValueError, match='has them in the order ball, box, in which'):
        check_class_names(coco(tmp_path, 'box', 'ball', more=more), 'data')


def test_no_categories_but_those_of_pictures(tmp_path):
    data = coco(tmp_path, 'ball', 'box')
    (tmp_path / 'boxes.json').write_text(json.dumps(dict(images=[dict(categories=[1, 2])])))
    check_class_names(data, 'data')
    (tmp_path / 'boxes.json').write_text(json.dumps(dict(images=[], categories=[])))
    with pytest.raises(ValueError, match="the class 'ball' is no category"):
        check_class_names(data, 'data')


def test_an_annotation_file_is_read_once(tmp_path, monkeypatch):
    data = coco(tmp_path, 'ball', 'box')
    files = []

    def get_text(file, backend_args):
        files.append(file)
        return Path(file).read_text()

    monkeypatch.setattr('vim_mm.engine.checks.classes.get_text', get_text)
    loop = SimpleNamespace(dataloader=SimpleNamespace(dataset=data))
    runner = SimpleNamespace(model=nn.Identity(), val_loop=loop, train_loop=loop, test_loop=loop)
    hook = ClassesHook()
    hook.before_train(runner)
    hook.before_val(runner)
    hook.before_val(runner)
    assert files == [data.ann_file]
    loop.dataloader.dataset = coco(tmp_path, 'box')  # another is another
    hook.before_test(runner)
    assert len(files) == 2


@pytest.mark.parametrize(
    ('classes', 'message'),
    [
        (('Ball', 'box'), r"the class 'Ball' is no category of .*boxes.json, which has ball, box"),
        (('ball', 'box', 'cone'), r"the class 'cone' is no category"),
        (('box', 'ball'), r'are box, ball, but .*boxes.json has them in the order ball, box'),
    ],
)
def test_classes_that_are_not_the_categories(classes, message, tmp_path):
    data = SimpleNamespace(datasets=[SimpleNamespace(dataset=coco(tmp_path, *classes))])
    with pytest.raises(ValueError, match=f'train.datasets.0.dataset: .*{message}'):
        check_class_names(data, 'train')
