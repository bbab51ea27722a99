"""Downloads are whole, and belong to one URL."""

import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from vim_mm.checkpoints.download import downloaded
from vim_mm.checkpoints.reading import load_from_http


def saved(number: float) -> bytes:
    file = io.BytesIO()
    torch.save(dict(weight=torch.full((2000,), number)), file)
    return file.getvalue()


class Server(ThreadingHTTPServer):
    """Serves ``content`` by path, and of a path in ``cut`` the first half alone."""

    def __init__(self) -> None:
        super().__init__(('127.0.0.1', 0), Handler)
        self.content: dict[str, bytes] = {}
        self.cut: set[str] = set()
        self.asked: list[str] = []
        self.url = f'http://127.0.0.1:{self.server_port}'


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        content = self.server.content.get(self.path)
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        if 'chunked' not in self.path:
            self.send_header('Content-Length', str(len(content)))
        self.end_headers()
        half = self.path in self.server.cut
        self.wfile.write(content[: len(content) // 2] if half else content)

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def server(tmp_path, monkeypatch) -> Iterator[Server]:
    monkeypatch.setattr('torch.hub._hub_dir', str(tmp_path / 'hub'))
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def number(url: str) -> float:
    return load_from_http(url)['weight'][0].item()


def test_files_of_one_name_are_told_apart(server):
    paths = ['/a/model.pth', '/b/model.pth', '/model.pth?version=1', '/model.pth?version=2']
    for value, path in enumerate(paths):
        server.content[path] = saved(value)
    for _ in range(2):  # the second time from the cache
        assert [number(server.url + path) for path in paths] == [0, 1, 2, 3]
    assert server.asked == paths


def test_a_download_that_is_cut_does_not_stay(server, tmp_path):
    server.content['/model.pth'] = saved(1)
    server.cut.add('/model.pth')
    with pytest.raises(OSError, match=r'/model\.pth cannot be downloaded: \d+ of \d+ bytes came'):
        number(f'{server.url}/model.pth')
    assert not [*Path(tmp_path).rglob('*model*')]
    server.cut.clear()
    assert number(f'{server.url}/model.pth') == 1


def test_a_server_that_does_not_tell_the_length(server):
    server.content['/chunked.pth'] = saved(1)
    server.cut.add('/chunked.pth')
    with pytest.raises(ValueError, match=r'/chunked\.pth .* cut off after \d+ bytes'):
        number(f'{server.url}/chunked.pth')
    server.cut.clear()
    assert number(f'{server.url}/chunked.pth') == 1  # what is damaged was not kept


def test_a_file_that_is_not_there_is_named(server, tmp_path):
    with pytest.raises(OSError, match=r'/none\.pth cannot be downloaded: Not Found'):
        downloaded(f'{server.url}/none.pth')
    assert not [*Path(tmp_path).rglob('*none*')]


def test_a_damaged_download_is_called_by_its_url(server):
    content = bytearray(saved(1))
    content[1000] ^= 1
    server.content['/bad.pth'] = bytes(content)
    with pytest.raises(ValueError, match=rf'{server.url}/bad\.pth is a damaged checkpoint'):
        number(f'{server.url}/bad.pth')


@pytest.mark.parametrize('name', ['', '..', 'a b%2F..%2Fc.pth', 'x' * 300])
def test_whatever_its_name_is_a_download_stays_in_the_cache(name, server, tmp_path):
    server.content[f'/{name.replace(" ", "%20")}'] = saved(1)
    path = downloaded(f'{server.url}/{name.replace(" ", "%20")}')
    assert path.parent == tmp_path / 'hub' / 'checkpoints'
