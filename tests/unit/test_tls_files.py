"""Files for TLS, by path."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from bufstore import ConfigError, NatsConfig, TlsFiles
from integration.test_cli_environments import Certificates


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"key": "/our.key"},
        {"ca": ""},
        {"ca": b"/ca.pem"},
        {"certificate": "/our.pem", "key": "-----BEGIN PRIVATE KEY-----\nhush\n-----END PRIVATE KEY-----\n"},
    ],
)
def test_what_names_no_files_is_refused_and_not_shown(files: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        TlsFiles(**files)
    assert "hush" not in str(refused.value)


def test_they_are_the_same_elsewhere_and_read_when_a_connection_is_made(tmp_path: Path) -> None:
    made = Certificates(tmp_path)
    files = TlsFiles(ca=made.ca, certificate=str(made.client_cert), key=made.client_key)
    config = NatsConfig(tls=files)
    assert pickle.loads(pickle.dumps(config)) == config
    context = config.tls_context
    assert context is not None
    assert len(context.get_ca_certs()) == 1
    made.client_key.write_text("nonsense")
    with pytest.raises(ConfigError, match=rf"{made.client_cert} and its key {made.client_key} cannot be used"):
        _ = config.tls_context
    made.ca.unlink()
    with pytest.raises(ConfigError, match=f"{made.ca} holds no CA certificates"):
        _ = config.tls_context
    assert NatsConfig().tls_context is None
