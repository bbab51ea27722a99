# DINO on Vim-Ti: SimpleFPN from stride 8 on; head, data and the schedule of 12 epochs are
# MMDetection's.
_base_ = 'mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py'
custom_imports = dict(imports=['vim_mm'])

model = dict(
    backbone=dict(
        _delete_=True,
        type='VisionMamba',
        arch='tiny',
        img_size=1024,
        out_indices=(23,),
        out_feature='residual',
        drop_path_rate=0.1,
        discretization_method='zoh',
    ),
    neck=dict(
        _delete_=True,
        type='SimpleFPN',
        in_channels=192,
        out_channels=256,
        num_outs=4,
        start_level=1,
    ),
)
# The backbone learns at a tenth, as MMDetection's does.
optim_wrapper = dict(constructor='LayerDecayOptimWrapperConstructor')
data_root = 'data/coco'
randomness = dict(seed=0)
