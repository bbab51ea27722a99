# Less than a million parameters on Fashion-MNIST, 196 tokens, for 200 epochs.
_base_ = './vim_t_fashion.py'

model = dict(
    backbone=dict(arch=dict(_delete_=True, embed_dims=128, num_layers=7)),
    head=dict(in_channels=128),
)
optim_wrapper = dict(optimizer=dict(lr=2e-3))
train_cfg = dict(max_iters=46800, val_interval=4680)
