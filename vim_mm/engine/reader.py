"""What tools read of a config's test data: the data set, its transforms, classes and images."""

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.logging import print_log
from mmengine.registry import DATASETS, init_default_scope

from vim_mm.config import dataset_options, type_name
from vim_mm.engine.batches.samples import leaves
from vim_mm.errors import UserValueError

# Of an image that is not of 8 bits: what is darkest and brightest in the drawing, in percent.
_STRETCH = (1, 99)


def leaf_dataset(cfg: Config) -> Mapping:
    """Options of the test data set, of one that repeats, joins or splits others the first within.

    Raises:
        ValueError: The config names none.
    """
    for _, options in dataset_options(cfg, 'test'):
        return options
    raise UserValueError(
        f'{cfg.filename}: test_dataloader.dataset must be a data set, but there is none'
    )


def prediction_pipeline(cfg: Config) -> Compose:
    """The transforms of testing, without those that look for annotations."""
    init_default_scope(cfg.default_scope)
    transforms = leaf_dataset(cfg).get('pipeline') or cfg.get('test_pipeline') or []
    return Compose([t for t in transforms if 'Annotation' not in type_name(t)])


def follow_test_data(cfg: Config) -> None:
    """Let ``test_pipeline``, which other people's functions read, be that of the test data.

    ``mmseg.apis.inference_model`` reads it. A config that changes the transforms of its data set
    inherits it from its base, with other transforms. So the config that a run writes is right, and
    a line says what to change in the file.
    """
    own = next((options for _, options in dataset_options(cfg, 'test')), {}).get('pipeline')
    if 'test_pipeline' in cfg and own and not same_transforms(cfg.test_pipeline, own):
        cfg.test_pipeline = copy.deepcopy(own)
        print_log(
            f'{cfg.filename}: test_pipeline is not the pipeline of test_dataloader.dataset, which '
            'is taken here; mmseg.apis.inference_model would read test_pipeline.',
            'current',
            logging.WARNING,
        )


def same_transforms(first: Sequence, second: Sequence) -> bool:
    """Whether two pipelines of a config are equal but for the scopes that MMEngine marks."""

    def plain(value):
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items() if key != '_scope_'}
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    return plain(first) == plain(second)


def class_meta(cfg: Config, checkpoint: Mapping | None = None) -> dict[str, Any]:
    """Names and colours of the classes, as 'classes' and 'palette', as far as they are known.

    Args:
        cfg (Config): Its data set is not built; no file is read.
        checkpoint (Mapping, optional): Its classes where the config has none, because they are
            those of an annotation file or of folders.
    """
    options = leaf_dataset(cfg)
    kind = options.get('type')
    if isinstance(kind, str):
        with DATASETS.switch_scope_and_registry(cfg.default_scope) as registry:
            kind = registry.get(kind)
    meta = {**getattr(kind, 'METAINFO', {}), **(options.get('metainfo') or {})}
    if isinstance(options.get('classes'), list | tuple):  # of MMPretrain
        meta['classes'] = options['classes']
    if not meta.get('classes'):
        meta |= ((checkpoint or {}).get('meta') or {}).get('dataset_meta') or {}
    classes = meta.get('classes')
    if classes and len(meta.get('palette') or ()) < len(classes):
        meta['palette'] = distinct_colours(len(classes))
    return meta


def distinct_colours(count: int) -> list[tuple[int, int, int]]:
    """RGB of so many classes, of hues that are far from their neighbours'."""
    from matplotlib.colors import hsv_to_rgb

    hues = (0.618034 * np.arange(count)) % 1  # the golden ratio
    values = np.where(np.arange(count) % 2, 0.7, 0.95)
    colours = hsv_to_rgb(np.stack([hues, np.full(count, 0.75), values], 1))
    return [tuple(map(int, colour)) for colour in (255 * colours).round()]


class Loaded:
    """A transform that keeps what the transforms before it have loaded, and changes nothing.

    Attributes:
        image (ndarray | None): (H, W) or (H, W, C) of the last sample, as it was loaded.
    """

    def __init__(self) -> None:
        self.image: np.ndarray | None = None
        self._rgb = False

    def __call__(self, results: dict) -> dict:
        """Keep a copy: transforms may write into what they get."""
        self.image = results['img'].copy()
        return results

    def put_into(self, pipeline: Compose) -> None:
        """Take the place behind the transforms that load the image."""
        loading = [i for i, t in enumerate(pipeline.transforms) if _loads(t)]
        behind = loading[-1] + 1 if loading else 0
        backend = getattr(pipeline.transforms[behind - 1], 'imdecode_backend', 'cv2')
        # Those of OpenCV and Pillow give BGR, this one the order of the file; and a data set that
        # holds images in memory has them in RGB.
        self._rgb = backend == 'tifffile' or not loading
        pipeline.transforms.insert(behind, self)

    def displayed(self, bands: Sequence[int] | None = None) -> np.ndarray:
        """The last image as :func:`displayed` makes it."""
        return displayed(self.image, bands, self._rgb)


def keep_loaded(dataset) -> Loaded:
    """:class:`Loaded` in the pipeline of a built data set, and of those within it."""
    loaded = Loaded()
    for inner, _ in leaves(dataset, ''):
        if isinstance(getattr(inner, 'pipeline', None), Compose):
            loaded.put_into(inner.pipeline)
    return loaded


def _loads(transform) -> bool:
    name = type(transform).__name__
    return name.startswith('Load') and 'Annotation' not in name and 'Proposals' not in name


def displayed(
    image: np.ndarray, bands: Sequence[int] | None = None, rgb: bool = False
) -> np.ndarray:
    """An image as it can be drawn over: (H, W, 3), uint8, RGB.

    Values of other types than uint8 are stretched between their 1st and 99th percentile, all bands
    alike; values of float images that are those of 8 bits stay.

    Args:
        image (ndarray): (H, W) or (H, W, C) of any bands and type of number.
        bands (Sequence[int], optional): Which bands are red, green and blue, from 0; or one, which
            is grey. They count as they are in the array.
        rgb (bool): Whether three bands are in this order, not in that of OpenCV.

    Raises:
        ValueError: There are neither one nor three bands, and ``bands`` chooses none.
    """
    image = image[..., None] if image.ndim == 2 else image
    count = image.shape[2]
    if bands:
        for band in bands:
            if band >= count:
                raise UserValueError(
                    f'--bands must be below {count}, the number of bands, got {band}'
                )
        chosen = image[..., [*bands]]
    elif count in (1, 3):
        chosen = image if rgb or count == 1 else image[..., ::-1]
    elif count == 4 and image.dtype == np.uint8:
        chosen = image[..., :3] if rgb else image[..., 2::-1]  # and transparency
    else:
        raise UserValueError(
            f'an image of {count} bands cannot be drawn: --bands R G B says which are red, green '
            'and blue, from 0'
        )
    chosen = np.repeat(chosen, 3, 2) if chosen.shape[2] == 1 else chosen
    return np.ascontiguousarray(_as_bytes(chosen))


def _as_bytes(image: np.ndarray) -> np.ndarray:
    if image.dtype == np.uint8:
        return image
    values = np.nan_to_num(image.astype(np.float32))
    whole = np.array_equal(values, values.round())
    if whole and values.min(initial=0) >= 0 and 1 < values.max(initial=0) <= 255:
        return values.astype(np.uint8)
    low, high = np.percentile(values, _STRETCH) if values.size else (0, 1)
    if high <= low:
        low, high = float(values.min()), float(values.max())
    scaled = (values - low) / max(high - low, np.finfo(np.float32).tiny)
    return (255 * scaled.clip(0, 1)).round().astype(np.uint8)
