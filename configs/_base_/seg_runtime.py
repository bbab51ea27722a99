_base_ = './default_runtime.py'

default_scope = 'mmseg'
default_hooks = dict(visualization=dict(type='SegVisualizationHook'))
env_cfg = dict(cudnn_benchmark=True)
visualizer = dict(
    type='SegLocalVisualizer',
    name='visualizer',
    alpha=0.5,
    vis_backends=[dict(type='LocalVisBackend')],
)
