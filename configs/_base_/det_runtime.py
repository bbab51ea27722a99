_base_ = './default_runtime.py'

default_scope = 'mmdet'
default_hooks = dict(visualization=dict(type='DetVisualizationHook'))
visualizer = dict(
    type='DetLocalVisualizer', name='visualizer', vis_backends=[dict(type='LocalVisBackend')]
)
