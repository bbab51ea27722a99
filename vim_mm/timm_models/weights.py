"""Weights by whatever name timm's configs have for them, read as data."""

from pathlib import Path
from typing import Any

from timm.models import PretrainedCfg

from vim_mm.checkpoints.download import read_downloaded
from vim_mm.checkpoints.file import read_file

# Where a configuration of timm names weights: none of them may be left for timm to open.
PLACES: dict[str, Any] = dict(file=None, url='', hf_hub_id=None, hf_hub_filename=None, source=None)
_NAMES = ('model.safetensors', 'pytorch_model.bin', 'pytorch_model.pth', 'model.pth')


def read_weights(cfg: PretrainedCfg, cache_dir: str | Path | None = None) -> dict | None:
    """What the configuration names, as data; timm would run what a pickle asks for.

    The order is timm's: the source by name, weights in memory, a file, the Hugging Face Hub, a URL.

    Args:
        cfg (PretrainedCfg): With overlay.
        cache_dir (str | Path, optional): For downloads from the Hub.

    Returns:
        dict | None: None where it names nothing, or weights in memory.

    Raises:
        FileNotFoundError: There is no such file, or none in the folder or the repository.
        NotACheckpointError: The file is something else, or damaged.
        UnsafeCheckpointError: The file holds more than tensors and plain data.
    """
    if cfg.source == 'local-dir':
        return read_file(_in_folder(Path(cfg.file or '')), 'cpu')
    if cfg.source != 'hf-hub':
        if cfg.state_dict:
            return None
        if cfg.file:
            return read_file(Path(cfg.file), 'cpu')
    if cfg.hf_hub_id:
        return read_file(_from_hub(cfg.hf_hub_id, cfg.hf_hub_filename, cache_dir), 'cpu')
    if isinstance(cfg.url, str) and cfg.url:
        return read_downloaded(cfg.url, 'cpu')
    return None


def _in_folder(folder: Path) -> Path:
    """The weights in a folder that timm or the Hub has written."""
    for name in _NAMES:
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f'{folder} holds none of {", ".join(_NAMES)}')


def _from_hub(repository: str, filename: str | None, cache_dir: str | Path | None) -> Path:
    """A downloaded file of a repository 'owner/name', or 'owner/name@revision'."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import EntryNotFoundError

    owner_and_name, _, revision = repository.partition('@')
    names = (filename,) if filename else _NAMES
    for name in names:
        try:
            return Path(
                hf_hub_download(
                    owner_and_name, name, revision=revision or None, cache_dir=cache_dir
                )
            )
        except EntryNotFoundError:
            continue
    raise FileNotFoundError(f'{repository} on the Hugging Face Hub has none of {", ".join(names)}')
