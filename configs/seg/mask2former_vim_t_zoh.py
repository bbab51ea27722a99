# Mask2Former on Vim-Ti through SimpleFPN; head, data and schedule are MMSegmentation's. Needs
# MMDetection.
_base_ = 'mmseg::mask2former/mask2former_r50_8xb2-160k_ade20k-512x512.py'
custom_imports = dict(imports=['vim_mm', 'mmdet.models'], allow_failed_imports=False)

model = dict(
    backbone=dict(
        _delete_=True,
        type='VisionMamba',
        arch='tiny',
        img_size=512,
        out_indices=(23,),
        out_feature='residual',
        drop_path_rate=0.1,
        discretization_method='zoh',
    ),
    neck=dict(type='SimpleFPN', in_channels=192, out_channels=256, num_outs=4),
    decode_head=dict(in_channels=[256, 256, 256, 256]),
    # 512 pixels as in training: the whole picture is more tokens than Vim has seen.
    test_cfg=dict(mode='slide', crop_size=(512, 512), stride=(341, 341)),
)
optim_wrapper = dict(constructor='LayerDecayOptimWrapperConstructor')
randomness = dict(seed=0)
