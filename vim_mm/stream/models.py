"""The config of a model as a stream takes it."""

from mmengine.config import Config

from vim_mm.config import dataset_options, type_name
from vim_mm.errors import UserValueError


def for_stream(cfg: Config, native: bool = False) -> None:
    """Change a config, in place, to one whose model predicts the same in less time and memory.

    MMSegmentation's ``EncoderDecoder`` becomes a ``FastEncoderDecoder``.

    Args:
        cfg (Config): Of MMSegmentation or MMDetection.
        native (bool): The model sees frames at their own size and as a whole: no Resize in the test
            pipeline, no windows, for a detector padding to multiples of 32 only. This changes what
            is predicted.

    Raises:
        ValueError: The config is a classifier's.
    """
    if cfg.default_scope == 'mmpretrain':
        raise UserValueError(
            "default_scope must be 'mmseg' or 'mmdet', got 'mmpretrain': segmentors and detectors "
            'are streamed; tools/infer.py draws what a classifier predicts'
        )
    if cfg.default_scope == 'mmseg' and type_name(cfg.model) == 'EncoderDecoder':
        cfg.model.type = 'FastEncoderDecoder'
    if native:
        same_size = dict(type='Resize', scale_factor=1.0, keep_ratio=True)
        for _, options in dataset_options(cfg, 'test'):
            options['pipeline'] = [
                same_size if type_name(t) == 'Resize' else t for t in options['pipeline']
            ]
        if cfg.default_scope == 'mmseg':
            cfg.model.test_cfg = dict(mode='whole')
        else:
            cfg.model.data_preprocessor.pad_size_divisor = 32
