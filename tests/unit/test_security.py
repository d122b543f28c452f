"""Servers and clients with a token and certificates from the environment, over real sockets."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from tests.unit.process_group.ranks import in_threads
from torchft._security import security, tokens
from torchft.checkpointing.codec.token import accepts, checkpoint_token
from torchft.coordination import LighthouseClient, LighthouseServer, ManagerClient, ManagerServer
from torchft.dlrover import TorchRendezvousService

TIMEOUT = timedelta(seconds=20)
SOON = timedelta(seconds=1)  # timeout of calls that are expected to fail


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with NAME.pem and NAME.key of ca, host, stranger (signed by another authority) and expired."""
    if shutil.which("openssl") is None:
        pytest.skip("the certificates are made with openssl")
    folder = tmp_path_factory.mktemp("authority")
    key = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
    (folder / "ext").write_text("subjectAltName = DNS:localhost, IP:127.0.0.1\n")

    def openssl(command: str) -> None:
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True, timeout=60)

    for ca in ("ca", "otherca"):
        openssl(f"req -x509 {key} -days 9 -subj /CN={ca} -keyout {ca}.key -out {ca}.pem")
    for name, ca, until in (("host", "ca", 9), ("stranger", "otherca", 9), ("expired", "ca", -1)):
        openssl(f"req {key} -subj /CN={name} -keyout {name}.key -out {name}.csr")
        openssl(
            f"x509 -req -in {name}.csr -CA {ca}.pem -CAkey {ca}.key -CAcreateserial -days {until} -extfile "
            "ext "
            f"-out {name}.pem"
        )
    return folder


def setting(monkeypatch: pytest.MonkeyPatch, **files: Any) -> None:
    for name, path in files.items():
        if path is None:
            monkeypatch.delenv(f"TORCHFT_{name}", raising=False)
        else:
            monkeypatch.setenv(f"TORCHFT_{name}", str(path))


@pytest.fixture
def token_and_tls(authority: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    token.chmod(0o600)
    ca, host = authority / "ca.pem", authority / "host"
    setting(
        monkeypatch,
        TOKEN_FILE=token,
        TLS_CERT=f"{host}.pem",
        TLS_KEY=f"{host}.key",
        TLS_CA=ca,
        TLS_CLIENT_CA=ca,
    )
    monkeypatch.setenv("TORCHFT_HOST", "localhost")


def refused(call: Callable[[timedelta], object], message: str, error: type[Exception] = RuntimeError) -> None:
    """Expects that the call, which gets a timeout, fails with this message.

    Such a call retries until its timeout. So the timeout is longer only after one that was too short for an
    answer.
    """
    for seconds in (0.3, 3, 20):
        with pytest.raises(error) as raised:
            call(timedelta(seconds=seconds))
        if re.search(message, str(raised.value)):
            return
    raise AssertionError(str(raised.value))


def manager_server(lighthouse: str, connect_timeout: timedelta = TIMEOUT) -> ManagerServer:
    return ManagerServer(
        "a",
        lighthouse,
        "localhost",
        "[::]:0",
        "localhost:1",
        1,
        heartbeat_interval=timedelta(seconds=1),
        connect_timeout=connect_timeout,
        quorum_retries=0,
    )


def test_the_rendezvous_of_torchrun(
    token_and_tls: None, authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HOST:PORT means TLS if the environment configures it, and the token is never sent without TLS."""
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1)
    endpoint = f"localhost:{lighthouse.address().rpartition(':')[2]}"

    def node(connect_timeout: float) -> TorchRendezvousService:
        return TorchRendezvousService(
            endpoint, "job/0", store="a:1", min_nodes=1, max_nodes=1, connect_timeout=connect_timeout
        )

    one = node(20)
    one.set_state()
    released = one.get_state(20)
    assert released is not None and released.size == 1
    with monkeypatch.context() as patch:
        setting(patch, TLS_CA=authority / "otherca.pem")
        refused(lambda t: node(t.total_seconds()), "certificate verify failed", RendezvousConnectionError)
    one.close()
    lighthouse.shutdown()


def test_token_and_certificates_together(
    token_and_tls: None, authority: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=10)
    server = manager_server(lighthouse.address())
    try:
        assert lighthouse.address().startswith("https://") and server.address().startswith("https://")
        rank = ManagerClient(server.address(), TIMEOUT)
        assert rank._quorum(0, 1, "", False, TIMEOUT, 0).replica_ids == ["a"]
        LighthouseClient(lighthouse.address(), TIMEOUT).heartbeat("b", TIMEOUT)

        guess = tmp_path / "guess"
        guess.write_text("guess")
        for token, message in (
            (None, "this server wants the job's token"),
            (guess, "the token is not the job's"),
        ):
            with monkeypatch.context() as patch:
                setting(patch, TOKEN_FILE=token)
                stranger = LighthouseClient(lighthouse.address(), TIMEOUT)
                with pytest.raises(RuntimeError, match=message):
                    stranger.quorum("c", TIMEOUT)
                with pytest.raises(RuntimeError, match=message):
                    stranger.heartbeat("c", TIMEOUT)
                # A ManagerClient in the server's process opens no connection to it, so only the server's
                # request to the lighthouse is refused.
                unknown = manager_server(lighthouse.address())
                with pytest.raises(RuntimeError, match=message):
                    ManagerClient(unknown.address(), TIMEOUT)._quorum(0, 1, "", False, TIMEOUT, 0)
                unknown.shutdown()

        for files, message in (
            ({"TLS_CA": authority / "otherca.pem"}, "certificate signed by unknown authority"),
            ({"TLS_CERT": authority / "stranger.pem", "TLS_KEY": authority / "stranger.key"}, "tls: "),
            ({"TLS_CERT": authority / "expired.pem", "TLS_KEY": authority / "expired.key"}, "expired"),
            ({"TLS_CERT": None, "TLS_KEY": None, "TLS_CLIENT_CA": None}, "certificate required"),
        ):
            with monkeypatch.context() as patch:
                setting(patch, **files)
                calls = [
                    lambda m=message: refused(lambda t: LighthouseClient(lighthouse.address(), t), m),
                    lambda m=message: refused(lambda t: manager_server(lighthouse.address(), t), m),
                ]
                assert in_threads(calls, 2 * TIMEOUT) == [None, None]

        plain = lighthouse.address().replace("https:", "http:")
        with pytest.raises(RuntimeError, match=r"with tls_ca \(TORCHFT_TLS_CA\) it must begin with https://"):
            LighthouseClient(plain, SOON)
        setting(monkeypatch, TLS_CA=None)
        refused(lambda t: LighthouseClient(plain, t), "its address must begin with https://")
    finally:
        server.shutdown()
        lighthouse.shutdown()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"TOKEN_FILE": "/missing"}, r"token_file \(TORCHFT_TOKEN_FILE\) is \"/missing\": it cannot be read"),
        ({"TLS_CERT": "/missing"}, r"tls_key \(TORCHFT_TLS_KEY\) is \"\""),
        ({"TLS_CA": "/dev/null"}, r"tls_ca \(TORCHFT_TLS_CA\) is \"/dev/null\": it must be a regular file"),
    ],
)
def test_a_file_that_cannot_be_used_is_a_value_error(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str], message: str
) -> None:
    setting(monkeypatch, **files)
    for make in (
        lambda: LighthouseServer(bind="[::]:0", min_replicas=1),
        lambda: LighthouseClient("http://localhost:1", SOON),
        lambda: ManagerClient("http://localhost:1", SOON),
        lambda: manager_server("http://localhost:1"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert tokens() == [] and checkpoint_token() == "" and accepts("")
    file = tmp_path / "token"
    monkeypatch.setenv("TORCHFT_TOKEN_FILE", str(file))
    assert json.loads(security())["token_file"] == str(file)
    with pytest.raises(ValueError, match="cannot be read"):
        tokens()
    file.write_text("\r\n new \n\nold\n")
    assert tokens() == ["new", "old"]
    shown = checkpoint_token()
    file.write_text("old\nnew\n")
    assert checkpoint_token() != shown and accepts(shown) and accepts(checkpoint_token())
    assert not accepts("") and not accepts("old")
    for content in ("", "\n \n", "two words", "sécret", "a\x00b"):
        file.write_text(content)
        with pytest.raises(ValueError, match="allowed are lines of printable ASCII"):
            tokens()
