"""Test-time augmentation: an image is predicted in several views, and the predictions are merged.

The merging models are the libraries' own. What a config does not say is as in MMSegmentation's base
of ADE20K (six sizes, each also mirrored) and as in the test scripts of MMDetection and MMPretrain
(mirrored).
"""

import copy
from collections.abc import Mapping

from mmengine.config import Config
from mmengine.model import is_model_wrapper
from torch import nn

from vim_mm.config import dataset_options, type_name
from vim_mm.errors import UserValueError

RATIOS = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75)
_MODELS = {
    'mmseg': dict(type='SegTTAModel'),
    'mmdet': dict(
        type='DetTTAModel',
        tta_cfg=dict(nms=dict(type='nms', iou_threshold=0.5), max_per_img=100),
    ),
    'mmpretrain': dict(type='AverageClsScoreTTA'),
}
_FLIPS = [dict(type='RandomFlip', prob=p, direction='horizontal') for p in (0.0, 1.0)]


def augment_test(cfg: Config) -> list[str]:
    """Let a test predict each image in several views: those of ``tta_pipeline``, or the default.

    Args:
        cfg (Config): Changed in place: its model becomes the module of ``tta_model``, and its test
            data sets get the views.

    Returns:
        list[str]: What a log should say, a line each.

    Raises:
        ValueError: Masks alone are to be measured, which MMDetection does not merge.
    """
    scope = cfg.default_scope
    lines = []
    views = 'tta_pipeline of the config'
    for _, options in dataset_options(cfg, 'test'):
        if cfg.get('tta_pipeline'):
            options['pipeline'] = copy.deepcopy(cfg.tta_pipeline)
        else:
            pipeline = options.get('pipeline') or cfg.get('test_pipeline')
            options['pipeline'] = default_views(pipeline, RATIOS if scope == 'mmseg' else ())
            sizes = f'{len(RATIOS)} sizes ({", ".join(map(str, RATIOS))}), each ' * (
                scope == 'mmseg'
            )
            views = f'{sizes}as it is and mirrored'
    merging = copy.deepcopy(cfg.get('tta_model') or _MODELS[scope])
    lines.append(f'Test-time augmentation by {type_name(merging)}: {views}.')
    model = cfg.model
    if 'data_preprocessor' in cfg:  # which would replace that of the module
        model.setdefault('data_preprocessor', cfg.pop('data_preprocessor'))
    if scope == 'mmseg':  # probabilities are averaged
        model.test_cfg = {**(model.get('test_cfg') or {}), 'store_logits': True}
    if type_name(merging) == 'DetTTAModel':
        lines += _measure_boxes_alone(cfg)
    cfg.model = {**merging, 'module': model}
    return lines


def default_views(pipeline: list, ratios: tuple[float, ...]) -> list:
    """The transforms of a test, with all pairs of a size and a flip in place of one size.

    Annotations are loaded behind these: they stay as they are in the file.

    Args:
        pipeline (list): Of a test data set.
        ratios (tuple[float]): To its sizes; none leaves them as they are.
    """
    loading = [t for t in pipeline if 'Annotation' in type_name(t)]
    rest = [copy.deepcopy(t) for t in pipeline if 'Annotation' not in type_name(t)]
    sized = next((i for i, t in enumerate(rest) if type_name(t) == 'Resize'), None)
    images = [i for i, t in enumerate(rest) if type_name(t).startswith('Load')]
    first = sized if sized is not None else images[-1] + 1 if images else 0
    before, after = rest[:first], rest[first:]
    sizes = []
    if ratios:
        one = after.pop(0) if sized is not None else dict(type='Resize', keep_ratio=True)
        sizes = [[_scaled(one, ratio) for ratio in ratios]]
    *middle, pack = after
    if pack.get('meta_keys') is not None:
        keys = (*pack['meta_keys'], 'flip', 'flip_direction')
        pack['meta_keys'] = tuple(dict.fromkeys(keys))
    views = [*sizes, *([t] for t in middle), copy.deepcopy(_FLIPS), *([t] for t in loading), [pack]]
    return [*before, dict(type='TestTimeAug', transforms=views)]


def _scaled(resize: Mapping, ratio: float) -> dict:
    """A Resize to a size that is ``ratio`` times its own."""
    scale = resize.get('scale')
    if scale is None:
        factor = resize.get('scale_factor') or 1.0
        many = isinstance(factor, list | tuple)
        factor = tuple(f * ratio for f in factor) if many else factor * ratio
        return {**resize, 'scale_factor': factor}
    sides = [scale] if isinstance(scale, int) else scale
    sides = tuple(max(1, round(side * ratio)) for side in sides)
    return {**resize, 'scale': sides[0] if isinstance(scale, int) else sides}


def _measure_boxes_alone(cfg: Config) -> list[str]:
    evaluator = cfg.test_evaluator
    found = False
    for metric in evaluator if isinstance(evaluator, list | tuple) else [evaluator]:
        asked = metric.get('metric')
        if asked == 'segm' or (isinstance(asked, list | tuple) and {*asked} == {'segm'}):
            raise UserValueError(
                '--tta: DetTTAModel merges boxes and no masks, and test_evaluator.metric is '
                f'{asked!r}'
            )
        if isinstance(asked, list | tuple) and 'segm' in asked:
            metric['metric'] = [each for each in asked if each != 'segm']
            found = True
    return ['DetTTAModel merges boxes: masks are left out.'] if found else []


def fit_merging(model: nn.Module) -> None:
    """Have a model of :func:`augment_test` merge what the libraries' classes do not.

    MMDetection's merges no masks: the detector predicts boxes alone. MMPretrain's merges scores,
    and leaves the labels of the first view beside them.

    Args:
        model (nn.Module): As the runner has it, distributed or not.
    """
    while is_model_wrapper(model):
        model = model.module
    kinds = {kind.__name__ for kind in type(model).__mro__}
    if 'DetTTAModel' in kinds:
        _leave_out_masks(model.module)
    if 'AverageClsScoreTTA' in kinds:
        _label_by_scores(model)


def _label_by_scores(model: nn.Module) -> None:
    merge, head = model.merge_preds, getattr(model.module, 'head', None)
    threshold, count = getattr(head, 'thr', None), getattr(head, 'topk', None)  # of several labels

    def merge_preds(views: list) -> list:
        merged = merge(views)
        for sample in merged:
            scores = sample.pred_score
            if threshold is not None:
                labels = (scores >= threshold).nonzero().squeeze(-1)
            else:
                labels = scores.topk(count if isinstance(count, int) else 1).indices
            sample.set_pred_label(labels)
        return merged

    model.merge_preds = merge_preds


def _leave_out_masks(detector: nn.Module) -> None:
    def forget(module: nn.Module, args: tuple, output):
        for sample in output if isinstance(output, list | tuple) else ():
            if 'masks' in getattr(sample, 'pred_instances', ()):
                del sample.pred_instances.masks
        return output

    detector.register_forward_hook(forget)
