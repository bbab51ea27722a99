"""Videos through a segmentor or a detector, frame by frame: what ``tools/stream.py`` is made of."""
