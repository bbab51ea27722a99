_base_ = [
    '../_base_/models/upernet_vim_b.py',
    '../_base_/datasets/ade20k_512x512.py',
    '../_base_/schedules/ade20k_paper_160k.py',
    '../_base_/seg_runtime.py',
]

model = dict(backbone=dict(discretization_method='zoh'))
train_dataloader = dict(batch_size=4)
