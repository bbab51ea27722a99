# What segmentation and detection share; seg_runtime.py and det_runtime.py build on it.
custom_imports = dict(imports=['vim_mm'])
default_hooks = dict(
    timer=dict(type='IterTimerHook'),
    logger=dict(type='LoggerHook', interval=50, log_metric_by_epoch=False),
    param_scheduler=dict(type='ParamSchedulerHook'),
    checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=2000, max_keep_ckpts=2),
    sampler_seed=dict(type='DistSamplerSeedHook'),
)
env_cfg = dict(
    # Speeds up the fixed-size inputs of segmentation only, see seg_runtime.py.
    cudnn_benchmark=False,
    mp_cfg=dict(mp_start_method='fork', opencv_num_threads=0),
    dist_cfg=dict(backend='nccl'),
)
log_processor = dict(type='LogProcessor', window_size=50, by_epoch=False)
log_level = 'INFO'
# The same for every method, so that runs differ in the method only.
randomness = dict(seed=0)
load_from = None
resume = False
