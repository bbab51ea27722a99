# The recipe of Vim's released detection (hustvl/Vim at dd0358a,
# det/projects/ViTDet/configs/COCO/cascade_mask_rcnn_vimdet_t_100ep_adj1.py), which is not the
# paper's: ViTDet's 100 epochs = 184375 iterations of 64 images, in steps.
#
# Weight decay: detectron2 takes it off PyTorch's norm classes, of which the model has none (its
# RMSNorm and the LayerNorm of its heads are classes of their own), and the config off `pos_embed`.
# So biases, norms, D and A_log all decay.
_base_ = './coco_paper_380k.py'

optim_wrapper = dict(
    paramwise_cfg=dict(
        layer_decay_rate=0.837,
        flat_decay_mult=1.0,
        marked_decay_mult=1.0,
        custom_keys={'backbone.pos_embed': dict(decay_mult=0.0)},
    ),
)
param_scheduler = [
    # detectron2's warmup ends one iteration later than MMEngine's of the same length.
    dict(type='LinearLR', start_factor=1e-3, by_epoch=False, begin=0, end=251),
    dict(type='MultiStepLR', milestones=[163889, 177546], gamma=0.1, by_epoch=False),
]
train_cfg = dict(max_iters=184375, val_interval=5000)
