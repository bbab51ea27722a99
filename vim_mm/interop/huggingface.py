"""Vim as a backbone of Hugging Face's transformers; importing this registers it there.

``transformers`` 5 or newer. Its own ``TimmBackbone`` hands few arguments to timm, and the method
of discretization is not among them; this configuration carries every argument.
"""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import AutoBackbone, AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.backbone_utils import BackboneConfigMixin, BackboneMixin
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_outputs import BackboneOutput
from transformers.utils import can_return_tuple

from vim_mm.errors import UserTypeError, UserValueError
from vim_mm.models import SimpleFPN, VisionMamba
from vim_mm.models.arguments import parse_arch
from vim_mm.models.state_dict import mark_initialized

__all__ = ['VimBackbone', 'VimConfig']

# What transformers chooses by stages of its own.
_CHOSEN = ('out_indices', 'out_type')
_ARGUMENTS = {
    name: parameter.default
    for name, parameter in inspect.signature(VisionMamba).parameters.items()
    if name not in _CHOSEN
}
# What the constructor of a configuration takes beside the fields that it has.
_OF_TRANSFORMERS = (
    'attn_implementation',
    'name_or_path',
    'num_labels',
    'output_attentions',
    'torch_dtype',
)


class VimConfig(BackboneConfigMixin, PreTrainedConfig):
    """The arguments of :class:`vim_mm.VisionMamba`, kept by ``save_pretrained``.

    Args:
        pyramid_channels (int, optional): None gives the outputs of layers, all at the distance of
            patches: stages 'layers.0', 'layers.1', ... A number gives maps of four strides with so
            many channels, which :class:`vim_mm.models.SimpleFPN` makes of the last layer: stages
            'stride4', 'stride8', 'stride16' and 'stride32' for patches of 16 pixels.
        out_features (list[str], optional): Names of stages; all of a pyramid or the last layer are
            the default.
        out_indices (list[int], optional): Their numbers.
        **kwargs: Arguments of :class:`vim_mm.VisionMamba` but ``out_indices`` and ``out_type``, of
            which ``out_feature`` is 'norm' by default; and those of ``PreTrainedConfig``.

    Raises:
        TypeError: There is no such argument.
        ValueError: There is no such stage, or patches are not a multiple of 4 pixels apart for a
            pyramid.
    """

    model_type = 'vim_mm'
    attribute_map = {'image_size': 'img_size', 'num_channels': 'in_channels'}

    def __init__(
        self,
        pyramid_channels: int | None = None,
        out_features: list[str] | None = None,
        out_indices: list[int] | None = None,
        **kwargs: Any,
    ):
        for theirs, ours in self.attribute_map.items():
            if theirs in kwargs:
                kwargs[ours] = kwargs.pop(theirs)
        own = {**_ARGUMENTS, 'out_feature': 'norm'}
        own.update({name: kwargs.pop(name) for name in own if name in kwargs})
        known = {*PreTrainedConfig().to_dict(), *_OF_TRANSFORMERS, 'stage_names'}
        unknown = [name for name in kwargs if name not in known and not name.startswith('_')]
        if unknown:
            raise UserTypeError(
                f'VimConfig has no {", ".join(unknown)}: expected some of {sorted(own)}'
            )
        kwargs.pop('stage_names', None)
        for name, value in own.items():
            setattr(self, name, value)
        self.pyramid_channels = pyramid_channels
        super().__init__(**kwargs)
        self.stage_names = self.stages()
        if pyramid_channels is not None and out_features is None and out_indices is None:
            out_features = self.stage_names
        self.set_output_features_output_indices(out_features, out_indices)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers, which without ``return_unused_kwargs`` drops what it does not know.

        Raises:
            TypeError: There is no such argument.
        """
        returned = kwargs.pop('return_unused_kwargs', False)
        config, unused = super().from_dict(config_dict, return_unused_kwargs=True, **kwargs)
        if returned:
            return config, unused
        if unused:
            raise UserTypeError(f'VimConfig has no {", ".join(unused)}')
        return config

    def stages(self) -> list[str]:
        """Names of the stages that the arguments have now.

        Raises:
            ValueError: Patches are not a multiple of 4 pixels apart for a pyramid.
        """
        if self.pyramid_channels is None:
            return [f'layers.{i}' for i in range(parse_arch(self.arch)[1])]
        stride = self.stride or self.patch_size
        if not isinstance(stride, int) or stride % 4:
            raise UserValueError(f'a pyramid needs one stride, divisible by 4, got {stride}')
        return [f'stride{stride * 2**i // 4}' for i in range(4)]

    def arguments(self) -> dict[str, Any]:
        """Of :class:`vim_mm.VisionMamba`, without its ``out_indices``."""
        given = {name: getattr(self, name) for name in _ARGUMENTS}
        # JSON has no tuples.
        return {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}


class VimBackbone(BackboneMixin, PreTrainedModel):
    """:class:`vim_mm.VisionMamba` behind the interface of transformers' backbones.

    Args:
        config (VimConfig): Arguments and stages.

    Raises:
        TypeError: An argument of the configuration is of another type.
        ValueError: An argument of the configuration is wrong or was changed to one of other
            stages, or it asks for attentions.
    """

    config_class = VimConfig
    base_model_prefix = 'backbone'
    main_input_name = 'pixel_values'
    input_modalities = ('image',)
    has_attentions = False
    supports_gradient_checkpointing = True

    def __init__(self, config: VimConfig):
        super().__init__(config)
        _refuse_attentions(config.output_attentions)
        if (stages := config.stages()) != config.stage_names:
            raise UserValueError(
                f'the stages of the configuration are {config.stage_names}, those of its arguments '
                f'{stages}: make a VimConfig of these arguments, they cannot be changed in one'
            )
        with_pyramid = config.pyramid_channels is not None
        layers = -1 if with_pyramid else self._layers()
        self.backbone = VisionMamba(**config.arguments(), out_indices=layers)
        channels = self.backbone.embed_dims
        self.pyramid = None
        if with_pyramid:
            self.pyramid = SimpleFPN(channels, config.pyramid_channels, num_outs=4)
            channels = config.pyramid_channels
        self.num_features = [channels] * len(config.stage_names)
        mark_initialized(self.parameters())
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: torch.nn.Module) -> None:
        """Initialize what was not loaded; transformers asks for it module by module."""
        weights = [*self.parameters()]
        loaded = [(weight, weight.clone()) for weight in weights if _has_value(weight)]
        if len(loaded) == len(weights):
            return
        for child in self.modules():  # children come after their parents, who know better
            if child is not self and hasattr(child, 'reset_parameters'):
                child.reset_parameters()
        self.backbone.reset_parameters()
        for weight, value in loaded:
            weight.copy_(value)
        mark_initialized(weights)

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether layers are recomputed in backward; transformers and its Trainer set this."""
        return self.backbone.with_cp

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enable: bool) -> None:
        self.backbone.with_cp = enable

    def _layers(self) -> tuple[int, ...]:
        """Of the stages that the configuration asks for now."""
        stages = range(len(self.config.stage_names))
        return tuple(stages[i] for i in self.config.out_indices)

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> BackboneOutput:
        """Images (B, in_channels, H, W) to maps (B, C, rows, columns), one for each stage.

        ``output_hidden_states`` adds the residual stream (B, L, C) in front of every layer and
        after the last one, class tokens where the layers see them. Layers after the last stage are
        not made. ``return_dict=False`` gives a tuple of the maps and, if asked for, hidden states.

        Raises:
            ValueError: The images have another shape, attentions are asked for, or the stages are
                not those that the model was built with.
        """
        _refuse_attentions(output_attentions)
        if self.pyramid is None and self._layers() != tuple(self.backbone.out_indices):
            built = [self.stage_names[i] for i in self.backbone.out_indices]
            raise UserValueError(
                f'VimBackbone was built with out_features {built}, got {self.out_features}: '
                'build it, or read it by from_pretrained, with these'
            )
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if output_hidden_states:
            maps, states = self._with_states(pixel_values)
        else:
            maps, states = self.backbone(pixel_values), None
        if self.pyramid is not None:
            levels = self.pyramid(maps)
            maps = tuple(levels[i] for i in self.config.out_indices)
        return BackboneOutput(feature_maps=maps, hidden_states=states)

    def _with_states(self, images: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """What the backbone returns, and the stream in front of every layer and at the end."""
        backbone = self.backbone

        def feature(i: int, *of_layer: Any) -> tuple[Tensor | None, ...]:
            _, stream, update, _ = of_layer
            wanted = i in backbone.out_indices
            return backbone._feature(i, *of_layer) if wanted else None, stream, update

        outputs, grid = backbone._tap(images, range(len(backbone.layers)), feature)
        features, streams, updates = zip(*outputs, strict=True)
        maps = tuple(backbone._format(x, grid) for x in features if x is not None)
        return maps, (*streams, streams[-1] + updates[-1])


def _refuse_attentions(wanted: bool | None) -> None:
    """Raise ValueError: there is none, and who reads it would find None without a word."""
    if wanted:
        raise UserValueError('VimBackbone gives no attentions')


def _has_value(weight: Tensor) -> bool:
    return getattr(weight, '_is_hf_initialized', False)


class _OwnName(WeightRenaming):
    """Gives weights back the name that they have in the file, which DETR and others change."""

    def reverse_transform(self) -> '_OwnName':
        return self  # saving meets no such name


# DETR, RT-DETR and D-FINE rename every out_proj of the model on reading, as if the mixers' were of
# their attention.
register_checkpoint_conversion_mapping(
    VimConfig.model_type, [_OwnName(r'mixer\.o_proj', 'mixer.out_proj')], overwrite=True
)
AutoConfig.register(VimConfig.model_type, VimConfig)
AutoBackbone.register(VimConfig, VimBackbone)
AutoModel.register(VimConfig, VimBackbone)
