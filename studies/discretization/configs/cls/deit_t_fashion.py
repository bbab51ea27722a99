# A plain vision transformer of the width and depth of vim_t_fashion.py, by the same recipe.
_base_ = './vim_t_fashion.py'

model = dict(
    backbone=dict(
        _delete_=True,
        type='VisionTransformer',
        arch=dict(embed_dims=192, num_layers=24, num_heads=3, feedforward_channels=768),
        img_size=28,
        patch_size=2,
        drop_path_rate=0.1,
    ),
)
