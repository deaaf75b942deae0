"""``elasticrun agent --join``: an agent that the driver did not start."""

from __future__ import annotations

import os
import secrets
from typing import NoReturn

from elasticstate.agent.serve import serve
from elasticstate.errors import OptionError
from elasticstate.machine import slots_of_this_machine
from elasticstate.net.launch import Launch
from elasticstate.net.trust import read_token


def join(
    address: str,
    token_file: str,
    name: str,
    slots: int,
    *,
    wait_s: float,
    connect_timeout_s: float,
    status_socket: str = "",
    rack: str = "",
) -> NoReturn:
    """Serve until the job ends, then exit. ``slots`` 0: as many as this machine has. Raises OptionError."""
    try:
        token = read_token(token_file)
    except FileNotFoundError:
        raise OptionError(
            f"--token-file: {token_file!r}: there is no such file. Copy the driver's token file to this machine."
        ) from None
    except (OSError, ValueError) as error:
        raise OptionError(f"--token-file: {token_file!r}: {error}") from None
    launch = Launch(
        host=name,
        agent=secrets.token_hex(8),
        slots=slots or slots_of_this_machine(),
        addresses=(address,),
        token=token,
        connect_timeout_s=connect_timeout_s,
        wait_s=wait_s,
        local_address="",
        socket="",
        directory=os.getcwd(),
        job_directory="",
        environment=(),
        rack=rack,
        is_joining=True,
    )
    serve(launch, status_socket)
