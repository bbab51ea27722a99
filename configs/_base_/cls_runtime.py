_base_ = './default_runtime.py'

default_scope = 'mmpretrain'
default_hooks = dict(visualization=dict(type='VisualizationHook', enable=False))
visualizer = dict(
    type='UniversalVisualizer', name='visualizer', vis_backends=[dict(type='LocalVisBackend')]
)
