"""`torchft doctor` finds problems, and names the remedy."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchft import addresses
from torchft.cli import main
from torchft.coordination import LighthouseClient, LighthouseServer
from torchft.http import _has_ipv6


@pytest.fixture(autouse=True)
def no_other_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test's job may have a lighthouse at the default port, whose groups are killed."""
    monkeypatch.setattr("torchft.cli.doctor.DEFAULT_PORT", 0)  # a free one


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(["doctor", "--quick", *arguments])
    return status, capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "finding"),
    [
        (
            None,
            "ok    TORCH_NCCL_DUMP_ON_TIMEOUT is not set: torchft run, and the import of "
            "torchft.process_group, set",
        ),
        ("0", "ok    TORCH_NCCL_DUMP_ON_TIMEOUT=0: ranks survive the failure of a peer"),
        (
            "true",
            "warn  TORCH_NCCL_DUMP_ON_TIMEOUT=true: with PyTorch's older NCCL backend, a failed peer may end",
        ),
    ],
)
def test_whether_pytorchs_monitor_ends_survivors(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, value: str | None, finding: str
) -> None:
    monkeypatch.delenv("TORCH_NCCL_DUMP_ON_TIMEOUT", raising=False)
    if value is not None:
        monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", value)
    answer = SimpleNamespace(returncode=0, stdout="True True 8 2.30.7", stderr="")
    monkeypatch.setattr("torchft.cli.doctor.subprocess.run", lambda *_, **__: answer)
    main(["doctor"])
    assert finding in capsys.readouterr().out


def test_a_machine_without_problems(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHFT_HOST", "127.0.0.1")
    status, output = doctor(capsys)
    assert "the native library loads" in output and "announces itself as 127.0.0.1" in output
    assert status == 0 and "BAD" not in output


def test_sources_that_hide_the_installed_package_from_scripts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHFT_HOST", "127.0.0.1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torchft").mkdir()
    (tmp_path / "torchft" / "__init__.py").touch()
    status, output = doctor(capsys)
    assert status == 1
    assert (
        "BAD   scripts in this folder, and `python -m` and `python -c` started here, do not load torchft: "
        "the source "
        f"folder {tmp_path / 'torchft'} hides the package"
    ) in output
    assert "copy the script to another folder, or build it in place with `pip install -e " in output
    (tmp_path / "torchft" / "_torchft_go.abi3.so").touch()
    assert doctor(capsys)[0] == 0, "they were built in place"


def test_the_network_interface_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHFT_HOST", "lo")
    status, output = doctor(capsys)
    assert "announces itself as 127.0.0.1 (interface lo)" in output and status == 0


@pytest.mark.skipif(not _has_ipv6(), reason="needs IPv6")
def test_an_ipv6_address_is_reached(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHFT_HOST", "::1")
    status, output = doctor(capsys)
    assert "announces itself as ::1" in output and "cannot connect" not in output and status == 0


def test_a_host_name_with_a_loopback_address(
    closed_ports: list[int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian gives the host's own name a loopback address, and Gloo announces the address of that name."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr("torchft.cli.doctor.socket.gethostname", lambda: "localhost")
    elsewhere = ("--lighthouse", "http://lighthouse.invalid:29510")
    _, output = doctor(capsys, *elsewhere)
    assert "localhost cannot be reached from other machines" in output and "set TORCHFT_HOST" in output
    assert "Gloo announces this machine as localhost, which is a loopback address" in output
    assert "GLOO_SOCKET_IFNAME" in output
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert "Gloo announces" not in doctor(capsys, *elsewhere)[1]
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    local = ("--lighthouse", f"http://localhost:{closed_ports[0]}")
    assert "Gloo announces" not in doctor(capsys, *local)[1], "all of the job is local"


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"", id="none"),
        pytest.param(b"SSH-2.0-OpenSSH_9.6\r\n", id="not HTTP"),
        pytest.param(b"HTTP/1.0 200 OK\r\n\r\n<html>hello</html>", id="a page"),
        pytest.param(b'HTTP/1.0 200 OK\r\n\r\n{"job": 1}', id="other JSON"),
        pytest.param(b"HTTP/1.0 404 Not Found\r\n\r\n", id="an error"),
    ],
)
def test_a_port_that_another_program_uses(
    answer: bytes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchft.cli.doctor._LOCAL_SEC", 30.0)
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setattr("torchft.cli.doctor.DEFAULT_PORT", port)

        def serve() -> None:
            with contextlib.suppress(OSError):  # the client may have closed the connection
                connection, _ = other.accept()
                with connection:
                    connection.recv(1000)
                    connection.sendall(answer)

        server = threading.Thread(target=serve)
        server.start()
        _, output = doctor(capsys)
        server.join(10)
        assert not server.is_alive()
    assert f"port {port}, the lighthouse's default, is not free" in output and "--bind" in output


def test_a_port_that_a_lighthouse_uses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHFT_HOST", "127.0.0.1")
    monkeypatch.setattr("torchft.cli.doctor._LOCAL_SEC", 30.0)
    server = LighthouseServer("127.0.0.1:0", min_replicas=1)
    try:
        port = int(server.address().rpartition(":")[2])
        monkeypatch.setattr("torchft.cli.doctor.DEFAULT_PORT", port)
        status, output = doctor(capsys)
    finally:
        server.shutdown()
    assert f"a lighthouse of torchft listens on port {port}" in output and "the lighthouse answers" in output
    assert status == 0 and "not free" not in output and "--bind" not in output


def test_a_host_setting_that_cannot_be_resolved(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHFT_HOST", "no-such-interface.invalid")
    status, output = doctor(capsys)
    assert status == 1 and "no-such-interface.invalid" in output


def test_a_machine_that_cannot_resolve_localhost(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHFT_HOST", "127.0.0.1")
    monkeypatch.setattr(addresses, "_resolves", lambda name: name != "localhost")
    status, output = doctor(capsys)
    assert status == 0 and "warn  this machine cannot resolve localhost" in output
    assert "--rdzv_endpoint 127.0.0.1:0" in output and output.endswith("nothing is broken\n")


def test_a_malformed_lighthouse_address(capsys: pytest.CaptureFixture[str]) -> None:
    status, output = doctor(capsys, "--lighthouse", "http://[")
    assert (
        status == 1
        and "the lighthouse address 'http://[' is not allowed; allowed: http://host:port" in output
    )


def test_a_lighthouse_that_is_not_there(closed_ports: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    status, output = doctor(capsys, "--lighthouse", f"http://127.0.0.1:{closed_ports[0]}")
    assert status == 1 and "no lighthouse answered" in output


def test_a_server_that_is_no_lighthouse(
    answering: Callable[[bytes], str], capsys: pytest.CaptureFixture[str]
) -> None:
    address = answering(b'HTTP/1.0 200 OK\r\n\r\n{"job": 1}')
    status, output = doctor(capsys, "--lighthouse", address)
    assert status == 1 and f"{address}/jobs answered other JSON: is it a lighthouse?" in output


def test_a_group_that_cannot_be_reached(closed_ports: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    address = f"http://127.0.0.1:{closed_ports[0]}"
    server = LighthouseServer("127.0.0.1:0", min_replicas=1, join_timeout_ms=100)
    try:
        second = timedelta(seconds=1)
        LighthouseClient(server.address(), 10 * second).quorum("lost", timeout=10 * second, address=address)
        status, output = doctor(capsys, "--lighthouse", server.address())
    finally:
        server.shutdown()
    assert "the lighthouse answers" in output
    assert status == 1 and f"the manager of lost at {address} cannot be reached" in output
    assert "TORCHFT_HOST" in output


def test_each_lighthouse_of_a_cluster_is_asked(
    closed_ports: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    away = f"http://127.0.0.1:{closed_ports[0]}"
    server = LighthouseServer("127.0.0.1:0", min_replicas=1)
    try:
        status, output = doctor(capsys, "--lighthouse", f"{server.address()},{away}")
    finally:
        server.shutdown()
    assert status == 1 and "the lighthouse answers" in output
    assert f"BAD   no lighthouse answered ({away}: " in output
    assert f"BAD   {server.address()}: this lighthouse is in no cluster" in output


@pytest.mark.slow
def test_the_backends_that_pytorch_has(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    main(["doctor"])
    output = capsys.readouterr().out
    assert "Gloo is available" in output and "no GPU: groups use Gloo" in output


def test_a_pytorch_that_does_not_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcuda is broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert main(["doctor"]) == 1
    assert "PyTorch does not start: ImportError: libcuda is broken" in capsys.readouterr().out
