# The recipe of Vim's released script (hustvl/Vim, seg/scripts/ft_vim_tiny_upernet.sh), which is
# not the paper's: 60k iterations of 32 images, AdamW, layer-wise decay.
_base_ = './ade20k_paper_160k.py'

optim_wrapper = dict(
    paramwise_cfg=dict(layer_decay_rate=0.92), optimizer=dict(lr=2e-4, weight_decay=0.1)
)
train_cfg = dict(max_iters=60000, val_interval=6000)
auto_scale_lr = dict(base_batch_size=32)
