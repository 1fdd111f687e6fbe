"""The servers that a file lists, for servers that come and go while a run goes on."""

from __future__ import annotations

import re
from pathlib import Path

from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.files import regular
from armature.components.contracts.machine import BASE_URL


def read_endpoints(file: Path) -> list[str]:
    """The base URLs in a file, one in a line, each once; text after a # is a comment.

    Raises:
        ConfigurationError: the file cannot be read, names no server, or has a line that is no base URL.
    """
    try:
        lines = [line.partition("#")[0].strip().rstrip("/") for line in regular(file).read_text().splitlines()]
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(
            f"the list of servers cannot be read: {error}",
            code="servers_file_unreadable",
            where=_where(file),
            remedy="write a base URL in each line",
        ) from error
    for number, line in enumerate(lines, 1):
        if line and not re.fullmatch(BASE_URL, line):
            raise ConfigurationError(
                f"line {number} is not the base URL of a server",
                code="invalid_server_url",
                where=_where(file),
                remedy="http://10.0.0.7:8000",
            )
    urls = list(dict.fromkeys(line for line in lines if line))
    if not urls:
        raise ConfigurationError(
            "the list of servers is empty", where=_where(file), remedy="write a base URL in each line"
        )
    return urls


def _where(file: Path) -> str:
    return f"machine.endpoints_file = {file}"
