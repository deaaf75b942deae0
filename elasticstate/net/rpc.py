"""gRPC between the driver and its agents: one two-way stream for each agent, and a question for the status.

No protobuf: the bytes are msgspec messages. Every call carries the job's token in its metadata, and is refused without
it, whatever the method. Each direction of a stream is first in, first out.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import msgspec

from elasticstate.net import messages

_SERVICE = "elasticstate.Control"
_TOKEN = "elasticstate-token"
_OPTIONS = [
    ("grpc.max_receive_message_length", messages.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", messages.MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),  # http_proxy is meant for the user's downloads
    ("grpc.so_reuseport", 0),
]


class AgentStream:
    """The driver's end of one agent's stream."""

    def __init__(self, hello: messages.AgentHello) -> None:
        self.hello = hello
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()

    def send(self, data: bytes) -> None:
        """Send an encoded message after all that were sent before; without effect when the agent is gone."""
        self._queue.put_nowait(data)

    async def _write(self, context: Any) -> None:
        with suppress(grpc.aio.BaseError, asyncio.InvalidStateError):  # the reader tells of the end of the stream
            while True:
                await context.write(await self._queue.get())


class ControlServer:
    """The driver's server. The callbacks run on its event loop.

    ``joined(stream)`` gets an agent that said hello, ``received(stream, message)`` what it says from then on,
    ``lost(stream, reason)`` its end, once. ``status()`` answers ``elasticrun status``.
    """

    def __init__(
        self,
        token: str,
        joined: Callable[[AgentStream], None],
        received: Callable[[AgentStream, messages.FromAgent], None],
        lost: Callable[[AgentStream, str], None],
        status: Callable[[], str],
    ) -> None:
        self._joined = joined
        self._received = received
        self._lost = lost
        self._status = status
        self._server = grpc.aio.server(interceptors=[_TokenCheck(token)], options=_OPTIONS)
        methods = {
            "Attach": grpc.stream_stream_rpc_method_handler(self._attach),
            "Status": grpc.unary_unary_rpc_method_handler(self._answer_status),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, methods),))

    async def start(self) -> str:
        """Listen on this machine; returns ``address:port``."""
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def stop(self) -> None:
        """End all streams."""
        await self._server.stop(grace=None)

    async def _attach(self, requests: AsyncIterator[bytes], context: Any) -> None:
        stream = AgentStream(await _hello(requests, context))
        writer = asyncio.ensure_future(stream._write(context))
        reason = "its stream has ended"
        self._joined(stream)
        try:
            async for data in requests:
                self._received(stream, messages.decode_from_agent(data))
        except msgspec.DecodeError as error:
            reason = f"it sent what is no message: {error}"
        finally:  # no await here: the call may have been cancelled
            writer.cancel()
            self._lost(stream, reason)

    async def _answer_status(self, _: bytes, __: object) -> bytes:
        return self._status().encode()


async def _hello(requests: AsyncIterator[bytes], context: Any) -> messages.AgentHello:
    async for data in requests:
        try:
            hello = messages.decode_from_agent(data)
        except msgspec.DecodeError:
            break
        if not isinstance(hello, messages.AgentHello):
            break
        if hello.protocol == messages.PROTOCOL_VERSION:
            return hello
        await context.abort(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"the agent speaks protocol {hello.protocol} (elasticstate {hello.version}), "
            f"the driver {messages.PROTOCOL_VERSION}: install the same version on all hosts",
        )
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message is no hello")
    raise AssertionError("abort raises")


class _TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self._refusal = grpc.stream_stream_rpc_method_handler(self._refuse)

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        given = dict(details.invocation_metadata).get(_TOKEN, "")
        given = given if isinstance(given, bytes) else given.encode()
        return await continuation(details) if hmac.compare_digest(given, self._token) else self._refusal

    @staticmethod
    async def _refuse(_: object, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the job's token is missing or wrong")


class DriverStream:
    """The agent's end of its stream."""

    def __init__(self, address: str, token: str, hello: messages.AgentHello) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        attach = self._channel.stream_stream(f"/{_SERVICE}/Attach")
        self._call = attach(metadata=((_TOKEN, token),))
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._writer = asyncio.ensure_future(self._write())
        self.send(hello)

    def send(self, message: messages.FromAgent) -> None:
        """Send after all that was sent before; without effect when the driver is gone."""
        self._queue.put_nowait(messages.encode(message))

    async def receive(self) -> messages.ToAgent:
        """The next message. Raises ConnectionError, with the reason, when there is no driver (any more)."""
        try:
            data = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise ConnectionError(f"{error.code().name}: {error.details()}") from None
        if data is grpc.aio.EOF:
            raise ConnectionError("the driver has closed the stream")
        order: messages.ToAgent = messages.decode_to_agent(data)
        return order

    async def flush(self) -> None:
        """Wait until all that was sent is on its way, or the driver is gone."""
        joined = asyncio.ensure_future(self._queue.join())
        await asyncio.wait({joined, self._writer}, return_when=asyncio.FIRST_COMPLETED)
        joined.cancel()

    async def close(self) -> None:
        self._writer.cancel()
        await asyncio.gather(self._writer, return_exceptions=True)
        await self._channel.close()

    async def _write(self) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # receive() tells why
            while True:
                data = await self._queue.get()
                await self._call.write(data)
                self._queue.task_done()


async def ask_status(address: str, token: str, timeout_s: float) -> str:
    """What the driver at ``address`` says of its job. Raises ConnectionError with the reason."""
    async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
        ask = channel.unary_unary(f"/{_SERVICE}/Status")
        try:
            answer: bytes = await ask(b"", metadata=((_TOKEN, token),), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise ConnectionError(f"{error.code().name}: {error.details()}") from None
    return answer.decode()
