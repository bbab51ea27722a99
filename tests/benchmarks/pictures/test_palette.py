"""One colour for a method or a model in every picture."""

from benchmarks.pictures.palette import METHOD_NAMES, STYLES, styles_of


def test_a_method_looks_the_same_whatever_stands_beside_it():
    for names in (METHOD_NAMES, METHOD_NAMES[::-1], ['deit_t', 'rk4'], ['foh', 'foh_matched']):
        for name, style in styles_of(names).items():
            if name in STYLES:
                assert style == STYLES[name]


def test_a_run_has_the_colour_of_its_method():
    styles = styles_of(['shapes_foh_seed3', 'shapes_zoh_exact', 'shapes'])
    assert styles['shapes_foh_seed3'] == STYLES['foh']
    assert styles['shapes_zoh_exact'] == STYLES['zoh_exact']
    assert styles['shapes'] not in STYLES.values()
    # Two runs of a method would look the same.
    seeds = styles_of(['zoh_seed0', 'zoh_seed1'])
    assert seeds['zoh_seed0'] != seeds['zoh_seed1']


def test_other_names_have_colours_of_their_own():
    names = [*METHOD_NAMES, 'foh_matched', 'zoh_exact_averaged', 'DeiT-T', 'Swin-T', 'ResNet-18']
    styles = styles_of(names)
    assert len({style['color'] for style in styles.values()}) == len(names)
    assert styles_of(['Swin-T', 'DeiT-S'])['DeiT-S']['color'] == styles['DeiT-T']['color']
