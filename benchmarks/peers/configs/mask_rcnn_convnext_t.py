# ConvNeXt-T (arXiv 2201.03545), MMPretrain's, under the heads of Mask R-CNN on Vim-Ti, with the
# feature pyramid that it was published with.
_base_ = 'vim_mm::det/mask_rcnn_vim_t_zoh.py'
custom_imports = dict(imports=['vim_mm', 'mmpretrain.models'])

model = dict(
    backbone=dict(
        _delete_=True,
        type='mmpretrain.ConvNeXt',
        arch='tiny',
        out_indices=(0, 1, 2, 3),
        gap_before_final_norm=False,
        drop_path_rate=0.4,
    ),
    neck=dict(
        _delete_=True, type='FPN', in_channels=[96, 192, 384, 768], out_channels=256, num_outs=5
    ),
)
