# Cascade Mask R-CNN on Vim-Ti as hustvl/Vim released it (45.7 box AP); see det/README.md.
_base_ = [
    '../_base_/models/cascade_mask_rcnn_vim_t_released.py',
    '../_base_/datasets/coco_lsj_released_1024x1024.py',
    '../_base_/schedules/coco_released_184k.py',
    '../_base_/det_runtime.py',
]

model = dict(backbone=dict(discretization_method='zoh'))
