_base_ = [
    '../_base_/models/linear_vim_t.py',
    '../_base_/datasets/ade20k_512x512.py',
    '../_base_/schedules/ade20k_paper_160k.py',
    '../_base_/seg_runtime.py',
]

model = dict(backbone=dict(discretization_method='zoh'))
