_base_ = [
    '../_base_/models/vim_s.py',
    '../_base_/datasets/imagenet_224.py',
    '../_base_/schedules/imagenet_paper_300e.py',
    '../_base_/cls_runtime.py',
]

model = dict(backbone=dict(discretization_method='zoh'))
train_dataloader = dict(batch_size=64)
