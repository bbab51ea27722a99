# A plain vision transformer, DeiT-Ti's, in place of Vim-Ti.
_base_ = './upernet_vim_t_fashion_zoh.py'

model = dict(
    backbone=dict(
        _delete_=True,
        type='VisionTransformer',
        img_size=(128, 128),
        patch_size=8,
        embed_dims=192,
        num_layers=12,
        num_heads=3,
        out_indices=(2, 5, 8, 11),
        drop_path_rate=0.1,
    ),
)
