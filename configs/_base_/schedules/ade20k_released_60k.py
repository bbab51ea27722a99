# The recipe of Vim's released segmentation, which is not the paper's, as it took effect: 60k
# iterations of 32 images in float32 (hustvl/Vim at bb3928b, seg/scripts/ft_vim_tiny_upernet.sh).
#
# Its script asks for a layer-wise decay of 0.92. The code that applies it looks for parameters
# called `blocks`, but the model's are called `layers`: only the patch embedding and the position
# embedding got the rate of the first of 26 depths, and all layers the full one.
#
# It takes weight decay off everything of one dimension and, it intends, off `pos_embed`. But the
# name it meets is `backbone.pos_embed`: the position embedding decays, and so does A_log.
_base_ = './ade20k_paper_160k.py'

optim_wrapper = dict(
    paramwise_cfg=dict(
        layer_decay_rate=1.0,
        marked_decay_mult=1.0,
        custom_keys={
            'backbone.pos_embed': dict(lr_mult=0.92**25),
            'backbone.patch_embed.proj.weight': dict(lr_mult=0.92**25),
            'backbone.patch_embed.proj.bias': dict(lr_mult=0.92**25, decay_mult=0.0),
        },
    ),
    optimizer=dict(lr=2e-4, weight_decay=0.1),
)
param_scheduler = [
    # MMCV's warmup ends one iteration later than MMEngine's of the same length.
    dict(type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=1501),
    dict(type='PolyLR', power=1.0, eta_min=0.0, by_epoch=False),
]
train_cfg = dict(max_iters=60000, val_interval=6000)
auto_scale_lr = dict(base_batch_size=32)
