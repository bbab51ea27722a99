# Vim-Ti on scenes of garments, from random weights, to be compared with
# mask_rcnn_swin_t_fashion.py: the same pyramid of strides 4 to 32, heads and schedule.
_base_ = './mask_rcnn_vim_fashion.py'

model = dict(
    backbone=dict(
        arch=dict(_delete_=True, embed_dims=192, num_layers=24), patch_size=8, out_indices=(23,)
    ),
    neck=dict(in_channels=192, start_level=1),
    # Anchors of 8 to 64 pixels; garments, of 28 to 64, get their 7 bins at stride 4.
    rpn_head=dict(anchor_generator=dict(scales=[2], strides=[4, 8, 16, 32])),
    roi_head=dict(
        bbox_roi_extractor=dict(featmap_strides=[4, 8, 16, 32], finest_scale=56),
        mask_roi_extractor=dict(featmap_strides=[4, 8, 16, 32], finest_scale=56),
    ),
)
optim_wrapper = dict(
    optimizer=dict(lr=1e-3),
    # Vim marks its own.
    paramwise_cfg=dict(custom_keys={'relative_position_bias_table': dict(decay_mult=0.0)}),
)
