# Cascade Mask R-CNN on Vim-Ti by the words of Vim's paper (arXiv 2401.09417, appendix B): 380k
# iterations of 64 images with linear decay. All that it does not name is the released code's.
_base_ = [
    '../_base_/models/cascade_mask_rcnn_vim_t_released.py',
    '../_base_/datasets/coco_lsj_released_1024x1024.py',
    '../_base_/schedules/coco_released_184k.py',
    '../_base_/det_runtime.py',
]

model = dict(backbone=dict(discretization_method='zoh'))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=False, begin=0, end=251),
    # Multiplies the warmup, and ends with train_cfg.max_iters, whatever that is.
    dict(type='PolyLR', power=1.0, eta_min=0.0, by_epoch=False),
]
train_cfg = dict(max_iters=380000, val_interval=20000)
