# DeiT-T (arXiv 2012.12877), MMSegmentation's VisionTransformer, under the neck, the heads and the
# recipe of UPerNet on Vim-Ti: what benchmarks hold beside it.
_base_ = 'vim_mm::seg/upernet_vim_t_zoh.py'

model = dict(
    backbone=dict(
        _delete_=True,
        type='VisionTransformer',
        img_size=(512, 512),
        patch_size=16,
        embed_dims=192,
        num_layers=12,
        num_heads=3,
        out_indices=(2, 5, 8, 11),
        drop_path_rate=0.1,
    )
)
