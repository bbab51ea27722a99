# Swin-T (arXiv 2103.14030), MMDetection's, under the heads of Mask R-CNN on Vim-Ti, with the
# feature pyramid that it was published with.
_base_ = 'vim_mm::det/mask_rcnn_vim_t_zoh.py'

model = dict(
    backbone=dict(
        _delete_=True,
        type='SwinTransformer',
        embed_dims=96,
        depths=(2, 2, 6, 2),
        num_heads=(3, 6, 12, 24),
        drop_path_rate=0.2,
    ),
    neck=dict(
        _delete_=True, type='FPN', in_channels=[96, 192, 384, 768], out_channels=256, num_outs=5
    ),
)
