"""Predictions as files, for ``tools/test.py --out``: a table of labels, or a map for each image."""

import csv
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from mmengine.evaluator import BaseMetric
from mmengine.registry import METRICS
from PIL import Image

from vim_mm.outputs import check_outputs
from vim_mm.whole_file import whole_file


@METRICS.register_module()
class LabelFile(BaseMetric):
    """Writes what MMPretrain's classifiers predict, and measures nothing.

    The file is CSV: the picture's path (its index where it has none), the true and the predicted
    class by name, and the score of the latter. Several labels of one image, and their scores, are
    separated by semicolons; an image without labels has none.

    Args:
        path (str): File to write, in a folder that exists.
    """

    default_prefix = 'labels'

    def __init__(self, path: str):
        super().__init__()
        self.path = path

    def process(self, data_batch: dict, data_samples: Sequence[dict]) -> None:
        """Note a batch."""
        for sample in data_samples:
            labels = as_labels(sample['pred_label'])
            self.results.append(
                (
                    sample.get('img_path') or sample['sample_idx'],
                    as_labels(sample.get('gt_label', ())),
                    labels,
                    [float(sample['pred_score'][label]) for label in labels],
                )
            )

    def compute_metrics(self, results: list[tuple]) -> dict:
        """Write the file; only the main process is asked to."""
        classes = (self.dataset_meta or {}).get('classes')

        def names(labels: list[int]) -> str:
            return ';'.join(str(classes[label] if classes else label) for label in labels)

        with (
            whole_file(Path(self.path)) as part,
            part.open('w', newline='', encoding='utf-8') as stream,
        ):
            table = csv.writer(stream)
            table.writerow(('image', 'truth', 'prediction', 'score'))
            for image, truth, found, scores in results:
                shown = ';'.join(f'{score:.4f}' for score in scores)
                table.writerow((image, names(truth), names(found), shown))
        return {}


def as_labels(labels) -> list[int]:
    """The indices in a tensor, a sequence or a number."""
    return np.asarray(labels, int).reshape(-1).tolist()


@METRICS.register_module()
class LabelMaps(BaseMetric):
    """Writes the labels that a segmentor predicts as a PNG for each image, and measures nothing.

    A pixel is the class, plus 1 where the data set has ``reduce_zero_label``; 16 bits where 8 do
    not hold all classes. A file is called as its image. Where several images have one name, in
    different folders or with different endings, files lie in folders like theirs, or keep the
    ending of the image: none is replaced by another.

    Args:
        folder (str): Where they go; it is made if need be.
    """

    default_prefix = 'maps'

    def __init__(self, folder: str):
        super().__init__()
        self.folder = Path(folder)
        self.names: dict[str, Path] = {}

    def name(self, dataset) -> None:
        """Choose the names for the images of a data set.

        Raises:
            ValueError: A file would replace an image or a map of labels that the data set reads.
        """
        infos = [*_infos(dataset)]
        self.names = map_names(info['img_path'] for info in infos)
        keys = (('img_path', 'an image'), ('seg_map_path', 'a map of labels'))
        read = [(what, info[key]) for info in infos for key, what in keys if info.get(key)]
        check_outputs([self.folder / name for name in self.names.values()], read)

    def process(self, data_batch: dict, data_samples: Sequence[dict]) -> None:
        """Write the files of a batch."""
        classes = len((self.dataset_meta or {}).get('classes') or ())
        for sample in data_samples:
            labels = sample['pred_sem_seg']['data'].squeeze(0).cpu().numpy()
            shift = int(bool(sample.get('reduce_zero_label', False)))
            dtype = np.uint8 if max(classes, int(labels.max()) + 1) + shift <= 256 else np.uint16
            name = self.names.get(sample['img_path']) or Path(
                f'{Path(sample["img_path"]).stem}.png'
            )
            file = self.folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(file) as part:
                Image.fromarray((labels + shift).astype(dtype)).save(part, format='PNG')
            self.results.append(1)

    def compute_metrics(self, results: list) -> dict:
        """No metrics."""
        return {}


def map_names(images: Iterable[str]) -> dict[str, Path]:
    """A relative path that ends in .png for each image, different for different images."""
    paths = [*dict.fromkeys(images)]
    names = {path: Path(f'{Path(path).stem}.png') for path in paths}
    # What a file system that ignores case tells apart as well.
    if _unique(names.values()):
        return names
    # Without '..', which would lead out of the folder that the names are in.
    whole = {path: Path(os.path.normpath(Path(path).absolute())) for path in paths}
    root = os.path.commonpath([path.parent for path in whole.values()])
    below = {path: absolute.relative_to(root) for path, absolute in whole.items()}
    names = {path: name.with_name(f'{name.stem}.png') for path, name in below.items()}
    if _unique(names.values()):
        return names
    return {path: name.with_name(f'{name.name}.png') for path, name in below.items()}


def _unique(names: Iterable[Path]) -> bool:
    return max(Counter(str(name).casefold() for name in names).values(), default=1) == 1


def _infos(dataset) -> Iterator[dict]:
    """What a data set, or one around others, knows of its images that are files."""
    if hasattr(dataset, 'get_data_info'):
        infos = (dataset.get_data_info(index) for index in range(len(dataset)))
        yield from (info for info in infos if isinstance(info.get('img_path'), str))
