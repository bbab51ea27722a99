# Vim-Ti as hustvl/Vim released it, instead of the paper's recipe; see det/README.md.
_base_ = [
    '../_base_/models/cascade_mask_rcnn_vim_t.py',
    '../_base_/datasets/coco_lsj_1024x1024.py',
    '../_base_/schedules/coco_released_184k.py',
    '../_base_/det_runtime.py',
]

model = dict(backbone=dict(discretization_method='zoh'))
