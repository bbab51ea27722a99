# Vim-Ti on ImageNet by the words of Vim's paper (arXiv 2401.09417, section 4.1). Of the parameter
# groups it says nothing: as in the released code, A_log decays, pos_embed and cls_token do not.
_base_ = './vim_t_zoh.py'

optim_wrapper = dict(
    paramwise_cfg=dict(
        marked_decay_mult=1.0,
        custom_keys={
            'backbone.pos_embed': dict(decay_mult=0.0),
            'backbone.cls_token': dict(decay_mult=0.0),
        },
    )
)
