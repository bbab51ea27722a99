# Vim-B on ImageNet by the words of Vim's paper; see vim_t_zoh_paper.py.
_base_ = './vim_b_zoh.py'

optim_wrapper = dict(
    paramwise_cfg=dict(
        marked_decay_mult=1.0,
        custom_keys={
            'backbone.pos_embed': dict(decay_mult=0.0),
            'backbone.cls_token': dict(decay_mult=0.0),
        },
    )
)
