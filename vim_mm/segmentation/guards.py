"""What the fast types refuse: whatever MMSegmentation's originals do, and as early as it shows.

The originals meet bad input in ``assert``s and in PyTorch's operators. A fast type calls others, so
it asks here. MMSegmentation is not imported.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from vim_mm.errors import UserTypeError, UserValueError
from vim_mm.models.arguments import check_choice, check_int, check_number

# MMSegmentation's losses that take a softmax whatever their arguments; the names are its own.
_OF_SOFTMAX = ('TverskyLoss', 'OhemCrossEntropy', 'HuasdorffDisstanceLoss')


def check_windows(name: str, test_cfg: Mapping | None) -> None:
    """Look whether the windows of a segmentor cover every pixel.

    Args:
        name (str): What the config calls ``test_cfg``.
        test_cfg (Mapping, optional): Of the segmentor; ``mode`` is 'whole' by default.

    Raises:
        ValueError: There is no such mode, or a stride lies beyond its crop.
        TypeError: A side is no integer, or there is no ``test_cfg``.
    """
    # A dict is a Mapping, and recognized faster as what it is.
    if not isinstance(test_cfg, (dict, Mapping)):
        raise UserTypeError(f'{name} must be a dict, got {test_cfg!r}')
    mode = test_cfg.get('mode', 'whole')
    if mode == 'whole':
        return
    check_choice(f'{name}.mode', mode, ('whole', 'slide'))
    for key in ('crop_size', 'stride'):
        value = test_cfg.get(key)
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise UserValueError(
                f"{name}.{key} must be two integers with {name}.mode='slide', got {value!r}"
            )
        for side in value:
            check_int(f'{name}.{key}', side)
    crop, stride = test_cfg['crop_size'], test_cfg['stride']
    if any(step > side for step, side in zip(stride, crop)):
        raise UserValueError(
            f'{name}.stride must be at most {name}.crop_size = {tuple(crop)}, got '
            f'{tuple(stride)}: pixels between the windows would have no class'
        )


def check_losses(head: nn.Module, name: str | None = None) -> None:
    """Look whether the losses of a decode head fit its output channels.

    Args:
        head (nn.Module): Of any type; what has no ``loss_decode`` passes.
        name (str, optional): What the config calls it, by default its type.

    Raises:
        ValueError: A loss has not one weight for each class, weights are negative or all 0, or it
            is the softmax of one channel.
        TypeError: ``class_weight`` holds no numbers.
    """
    if not hasattr(head, 'loss_decode'):
        return
    name = type(head).__name__ if name is None else name
    channels = head.out_channels
    losses = head.loss_decode
    for criterion in losses if isinstance(losses, nn.ModuleList) else [losses]:
        kind = type(criterion).__name__
        plain = kind == 'CrossEntropyLoss' and not (criterion.use_sigmoid or criterion.use_mask)
        if channels == 1 and (plain or _takes_softmax(criterion)):
            raise UserValueError(
                f'{name} has one output channel (num_classes={head.num_classes}), whose softmax '
                f'is always 1, so that {kind} is always 0: set num_classes=2 for background and '
                'object, or num_classes=2, out_channels=1 and loss_decode.use_sigmoid=True'
            )
        if plain:
            _check_weights(f'{name}.loss_decode.class_weight', criterion.class_weight, channels)
        elif isinstance(getattr(criterion, 'class_weight', None), list | tuple):
            count = len(criterion.class_weight)
            if count not in (1, channels, head.num_classes):
                raise UserValueError(_of_another_length(name, count, head.num_classes))


def _takes_softmax(criterion: nn.Module) -> bool:
    """Of MMSegmentation's other losses those that are of several classes."""
    kind = type(criterion).__name__
    of_lovasz = getattr(getattr(criterion, 'cls_criterion', None), '__name__', '')
    return kind in _OF_SOFTMAX or (kind == 'LovaszLoss' and of_lovasz == 'lovasz_softmax')


def _of_another_length(name: str, count: int, classes: int) -> str:
    return (
        f'{name}.loss_decode.class_weight must have a weight for each of the num_classes = '
        f'{classes} classes, got {count}'
    )


def _check_weights(name: str, weights: Sequence[float] | None, channels: int) -> None:
    if weights is None:
        return
    if hasattr(weights, 'tolist'):  # an array or a tensor, as of a file
        weights = weights.tolist()
    if not isinstance(weights, list | tuple):
        raise UserTypeError(f'{name} must be a list of numbers, got {weights!r}')
    for weight in weights:
        check_number(name, weight)
        if not 0 <= weight < float('inf'):
            raise UserValueError(f'{name} must be finite and not negative, got {weights}')
    if weights and not any(weights):
        raise UserValueError(f'{name} must not be 0 for all classes: the loss is always 0')
    if len(weights) != channels:
        raise UserValueError(
            _of_another_length(name.partition('.loss_decode')[0], len(weights), channels)
        )


def check_logits(logits: Tensor, batch: int, channels: int | None = None) -> None:
    """Look whether a head gave logits (batch, channels, h, w).

    Raises:
        TypeError: It gave no tensor.
        ValueError: It gave another shape; ``channels`` None stands for any.
    """
    if not isinstance(logits, Tensor):
        raise UserTypeError(
            f'decode_head must give a tensor of logits, got {type(logits).__name__}'
        )
    shape = tuple(logits.shape)
    if logits.dim() != 4 or shape[0] != batch or channels not in (None, shape[1]):
        asked = 'C' if channels is None else f'out_channels = {channels}'
        raise UserValueError(f'decode_head must give logits ({batch}, {asked}, h, w), got {shape}')


def checked_metas(samples: Sequence, inputs: Tensor) -> list[dict]:
    """The meta information of the data samples of a batch.

    Raises:
        TypeError: ``inputs`` is no tensor.
        ValueError: There is not one sample for each image, or one is flipped in another way.
    """
    if not isinstance(inputs, Tensor):
        raise UserTypeError(f'inputs must be a tensor of images, got {type(inputs).__name__}')
    images = inputs.shape[0]
    if len(samples) != images:
        raise UserValueError(
            f'data_samples must be one for each of {images} images, got {len(samples)}'
        )
    metas = [sample.metainfo for sample in samples]
    for meta in metas:
        if meta.get('flip') and meta.get('flip_direction') not in ('horizontal', 'vertical'):
            raise UserValueError(
                "data_samples: flip_direction must be 'horizontal' or 'vertical', got "
                f'{meta.get("flip_direction")!r}'
            )
    return metas


def check_batch(
    inputs: Sequence[Tensor], samples: Sequence | None, size: tuple | None, training: bool
) -> None:
    """Look whether the images of a batch have one size.

    Args:
        inputs (Sequence[Tensor]): Images (C, H, W).
        samples (Sequence, optional): Their data samples, by whose files the message names them.
        size (tuple, optional): (H, W) to which smaller images are padded in training; None pads
            them all to the largest.
        training (bool): In testing nothing is padded before.

    Raises:
        ValueError: Sizes differ.
    """
    if (training and size is None) or any(image.dim() != 3 for image in inputs):
        return
    least = size[-2:] if training else (0, 0)
    padded = [tuple(max(a, b) for a, b in zip(image.shape[-2:], least)) for image in inputs]
    for i, one in enumerate(padded):
        if one != padded[0]:
            remedy = 'give the loader batch_size=1'
            if training:
                remedy = (
                    'crop them (RandomCrop) or resize them (Resize with keep_ratio=False) in the '
                    f'pipeline; data_preprocessor.size = {tuple(size)} enlarges smaller ones'
                )
            raise UserValueError(
                'the images of a batch must have one size, got '
                f'{_by(padded[0])} ({_named(samples, 0)}) and {_by(one)} ({_named(samples, i)}): '
                f'{remedy}'
            )


def _by(size: tuple[int, int]) -> str:
    return f'{size[0]} x {size[1]}'


def _named(samples: Sequence | None, index: int) -> str:
    if samples is None or len(samples) <= index:
        return f'number {index}'
    return str(samples[index].metainfo.get('img_path', f'number {index}'))


def check_channels_swap(inputs: Sequence[Tensor]) -> None:
    """ValueError if not all images have the three channels that the first one has."""
    for i, image in enumerate(inputs):
        if image.dim() != 3 or image.size(0) != 3:
            raise UserValueError(
                f'the first image of the batch has 3 channels, number {i} has the shape '
                f'{tuple(image.shape)}'
            )
