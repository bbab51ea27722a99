"""The predictions of a classifier as a table, for ``tools/test.py --out``."""

import csv
from collections.abc import Sequence
from pathlib import Path

from mmengine.evaluator import BaseMetric
from mmengine.registry import METRICS


@METRICS.register_module()
class LabelFile(BaseMetric):
    """Writes what MMPretrain's classifiers predict, and measures nothing.

    The file is CSV: the picture's path (its index where it has none), the true and the predicted
    class by name, and the score of the latter.

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
            label = int(sample['pred_label'])
            self.results.append(
                (
                    sample.get('img_path') or sample['sample_idx'],
                    int(sample['gt_label']),
                    label,
                    float(sample['pred_score'][label]),
                )
            )

    def compute_metrics(self, results: list[tuple]) -> dict:
        """Write the file; only the main process is asked to."""
        classes = (self.dataset_meta or {}).get('classes')
        with Path(self.path).open('w', newline='') as stream:
            table = csv.writer(stream)
            table.writerow(('image', 'truth', 'prediction', 'score'))
            for image, truth, label, score in results:
                names = (classes[truth], classes[label]) if classes else (truth, label)
                table.writerow((image, *names, f'{score:.4f}'))
        return {}
