"""The insides of aiortc and aioice that two files of ours touch, by name: a release that changes one fails here."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
from pathlib import Path

import aioice
import pytest
from aioice import ice, turn
from aiortc import RTCCertificate, RTCDtlsTransport, RTCIceGatherer, RTCIceTransport, RTCSctpTransport
from aiortc.rtcdtlstransport import State

import peerllm.link
from peerllm.link import aioice_private, aiortc_private

LINK = Path(peerllm.link.__file__).parent
CONNECTION = (
    "_check_list",
    "_closing",
    "_local_candidates",
    "_local_candidates_end",
    "_local_candidates_start",
    "_nominated",
    "_protocols",
    "_queue",
    "_remote_candidates",
)
SCTP = (
    "_association_state",
    "_data_channel_id",
    "_data_channel_queue",
    "_data_channels",
    "_last_received_tsn",
    "_local_partial_reliability",
    "_local_port",
    "_local_tsn",
    "_local_verification_tag",
    "_loop",
    "_remote_port",
    "_remote_verification_tag",
    "_rto",
    "_sack_needed",
)


@pytest.mark.parametrize(("name", "module"), [("aiortc", aiortc_private), ("aioice", aioice_private)])
def test_the_installed_release_is_one_that_we_know(name: str, module: object) -> None:
    assert importlib.metadata.version(name).startswith(module.SUPPORTED)  # type: ignore[attr-defined]


async def test_an_ice_connection_has_the_attributes_that_we_set_and_read() -> None:
    connection = aioice.Connection(ice_controlling=True)
    assert [name for name in CONNECTION if not hasattr(connection, name)] == []
    for method in ("_pair_remote_candidate", "sort_check_list", "data_received", "query_consent", "close"):
        assert callable(getattr(connection, method))
    assert list(inspect.signature(connection.data_received).parameters) == ["data", "component"]
    protocol = ice.StunProtocol(connection)
    assert list(inspect.signature(protocol.datagram_received).parameters) == ["data", "addr"]
    assert list(inspect.signature(protocol.request).parameters)[:2] == ["request", "addr"]
    assert "_TurnTransport__close_task" in vars(turn.TurnTransport(None))  # type: ignore[arg-type]


async def test_the_ortc_objects_have_the_attributes_that_we_set_and_read() -> None:
    gatherer = RTCIceGatherer(iceServers=[])
    assert isinstance(gatherer._connection, aioice.Connection)
    transport = RTCIceTransport(gatherer)
    assert transport._connection is gatherer._connection
    dtls = RTCDtlsTransport(transport, [RTCCertificate.generateCertificate()])
    assert dtls._state is State.NEW
    assert [name for name in ("_ssl", "_task", "_stats_id") if not hasattr(dtls, name)] == []
    stats = dtls._get_stats()[dtls._stats_id]
    assert (stats.bytesSent, stats.packetsReceived) == (0, 0)
    sctp = RTCSctpTransport(dtls)
    assert [name for name in SCTP if not hasattr(sctp, name)] == []


def test_the_sctp_transport_has_the_methods_that_ours_replaces() -> None:
    for name, method in vars(aiortc_private.SctpTransport).items():
        ours = inspect.isfunction(method) and name.startswith("_") and not name.startswith("__")
        theirs = getattr(RTCSctpTransport, name, None)
        if ours and theirs is not None:
            assert inspect.iscoroutinefunction(theirs) == inspect.iscoroutinefunction(method), name
            assert list(inspect.signature(theirs).parameters) == list(inspect.signature(method).parameters), name
    for name in (
        "_data_channel_flush",
        "_data_channel_send",
        "_handle_data",
        "_receive_chunk",
        "_send_sack",
        "_set_state",
        "_transmit",
    ):
        assert name in vars(RTCSctpTransport), name
        assert name in vars(aiortc_private.SctpTransport), name


def test_only_two_files_touch_private_attributes_of_the_libraries() -> None:
    """`_x` on anything but `self` or `cls` is somebody else's, and in `link` only those files may."""
    offenders = []
    for path in LINK.rglob("*.py"):
        if path.name in ("aiortc_private.py", "aioice_private.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                owner = node.value
                if not (isinstance(owner, ast.Name) and owner.id in ("self", "cls")):
                    offenders.append(f"{path.name}: {ast.unparse(node)}")
    assert offenders == []
