"""Prefect's server with a check of the Host header, run by uvicorn as an application factory.

Prefect itself checks the auth string and the origins of browser requests. Without the check of the Host header, a
foreign web page could pass for one of the platform's own pages (DNS rebinding).
"""

from __future__ import annotations

import os

from starlette.middleware.trustedhost import TrustedHostMiddleware

from armature.components.contracts.errors import ConfigurationError

ALLOWED_HOSTS = "ARMATURE_ALLOWED_HOSTS"
"""Environment variable with the allowed values of the Host header, separated by commas."""


def create_app() -> TrustedHostMiddleware:
    """Return Prefect's server application behind the check of the Host header.

    Raises:
        ConfigurationError: the environment has no auth string or no allowed hosts.
    """
    for name in ("PREFECT_SERVER_API_AUTH_STRING", ALLOWED_HOSTS):
        if not os.environ.get(name):
            raise ConfigurationError(
                f"Prefect's server does not start without {name}: its API runs commands for whoever reaches it",
                code="prefect_variable_missing",
                where="environment",
                remedy=f"set {name}; `armature up` does",
            )
    from prefect.server.api.server import create_app

    return TrustedHostMiddleware(create_app(), os.environ[ALLOWED_HOSTS].split(","), www_redirect=False)
