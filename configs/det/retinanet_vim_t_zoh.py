_base_ = [
    '../_base_/models/retinanet_vim_t.py',
    '../_base_/datasets/coco_lsj_1024x1024.py',
    '../_base_/schedules/coco_paper_380k.py',
    '../_base_/det_runtime.py',
]

model = dict(backbone=dict(discretization_method='zoh'))
val_evaluator = dict(metric='bbox')
test_evaluator = val_evaluator
