# The recipe of Vim's released detection (hustvl/Vim, det/projects/ViTDet/configs/COCO), which is
# not the paper's: ViTDet's 100 epochs = 184375 iterations of 64 images, in steps.
_base_ = './coco_paper_380k.py'

param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=False, begin=0, end=250),
    dict(type='MultiStepLR', milestones=[163889, 177546], gamma=0.1, by_epoch=False),
]
train_cfg = dict(max_iters=184375)
