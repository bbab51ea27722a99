# DeiT-T (arXiv 2012.12877), MMSegmentation's VisionTransformer, under the neck and the heads of
# Mask R-CNN on Vim-Ti: what benchmarks hold beside it. Attention is global in every layer.
_base_ = 'vim_mm::det/mask_rcnn_vim_t_zoh.py'
custom_imports = dict(imports=['vim_mm', 'mmseg.models'])

model = dict(
    backbone=dict(
        _delete_=True,
        type='mmseg.VisionTransformer',
        img_size=(800, 1344),
        patch_size=16,
        embed_dims=192,
        num_layers=12,
        num_heads=3,
        out_indices=(11,),
        final_norm=True,
        drop_path_rate=0.1,
    )
)
