# Fully sharded data parallelism by MMEngine's own strategy: parameters, gradients and the state of
# the optimizer are divided among the processes, and gathered for a layer of the backbone at a time.
# Beside any config of this package that does not clip gradients:
#
#     _base_ = ['vim_mm::seg/upernet_vim_b_zoh.py', 'vim_mm::_base_/fsdp.py']
runner_type = 'FlexibleRunner'
strategy = dict(
    type='FSDPStrategy',
    model_wrapper=dict(type='MMFullyShardedDataParallel', auto_wrap_policy='wrap_vim_blocks'),
    # Checkpoints are those of the whole model, which every tool reads.
    state_dict_cfg='full',
)
