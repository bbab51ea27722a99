"""A frame on the device has the values that the config's test pipeline gives it."""

import cv2
import numpy as np
import pytest
import torch

from vim_mm.stream.pixels import FrameError, Preprocessing, Resize, check_transforms


@pytest.mark.parametrize(
    ('size', 'target'),
    [
        ((270, 480), (128, 228)),
        ((144, 192), (128, 171)),
        ((120, 160), (128, 171)),
        ((33, 47), (64, 64)),
        ((100, 200), (50, 100)),  # exact halves
        ((100, 200), (50, 101)),
        ((100, 101), (25, 25)),
        ((54, 96), (18, 32)),
        ((2, 3), (7, 9)),
        ((5, 1), (9, 4)),
        ((40, 30), (40, 30)),
    ],
)
def test_resizes_as_opencv(size, target):
    picture = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    expected = cv2.resize(picture, target[::-1], interpolation=cv2.INTER_LINEAR)
    result = Resize(size, target, torch.device('cpu'))(torch.from_numpy(picture))
    assert np.array_equal(result.numpy(), expected)


@pytest.mark.parametrize('size', [(64, 96), (200, 90), (32, 64)])
@pytest.mark.parametrize('task', ['seg', 'det'])
def test_a_frame_is_what_infer_makes_of_the_picture(task, size, request, tmp_path):
    from mmengine.dataset import Compose, pseudo_collate

    task = request.getfixturevalue(task)
    frame = np.random.default_rng(1).integers(0, 256, (*size, 3), dtype=np.uint8)
    cv2.imwrite(str(tmp_path / 'picture.png'), frame)
    data = Compose(task.transforms)(dict(img_path=str(tmp_path / 'picture.png'), img_id=0))
    expected = task.model.data_preprocessor(pseudo_collate([data]), False)
    preprocess = Preprocessing(task.transforms, task.model.data_preprocessor, size)
    assert torch.equal(preprocess(torch.from_numpy(frame)), expected['inputs'])
    assert expected['inputs'].std() > 0.5
    theirs, ours = expected['data_samples'][0].metainfo, preprocess.sample.metainfo
    assert {**theirs, 'img_path': ''} == {**ours, 'img_path': ''}


def test_frames_that_would_have_no_pixels_are_refused(seg):
    from mmcv.transforms import Resize as Transform

    transforms = [*seg.transforms]
    transforms[1] = Transform((64, 64), keep_ratio=True)
    with pytest.raises(FrameError, match='frames of 1 x 300 pixels cannot be resized'):
        Preprocessing(transforms, seg.model.data_preprocessor, (1, 300))


def test_other_pipelines_are_refused(seg):
    from mmcv.transforms import Resize as Transform

    first, _, *rest = seg.transforms
    for transforms, message in [
        ([first, *seg.transforms], 'got LoadImageFromFile, LoadImageFromFile, Resize'),
        ([first, Transform((8, 8), interpolation='area'), *rest], "interpolation='bilinear'"),
    ]:
        with pytest.raises(ValueError, match=message):
            Preprocessing(transforms, seg.model.data_preprocessor, (64, 96))


@pytest.mark.parametrize('pack', ['PackSegInputs', 'FastPackSegInputs'])
def test_pipelines_of_both_packings_are_known(pack):
    from mmcv.transforms import LoadImageFromFile

    transforms = pytest.importorskip('vim_mm.segmentation.transforms')
    check_transforms([LoadImageFromFile(), getattr(transforms, pack)()])
