"""Prefect's server, for those who know its auth string and call it by its name.

Run by uvicorn as a factory. Prefect checks the auth string and the origins that a browser may come from; the Host
header, by which a web page can pass for one of our own (DNS rebinding), is checked here.
"""

from __future__ import annotations

import os

from starlette.middleware.trustedhost import TrustedHostMiddleware

from armature.components.contracts.errors import ConfigurationError

ALLOWED_HOSTS = "ARMATURE_ALLOWED_HOSTS"


def create_app() -> TrustedHostMiddleware:
    """
    Raises:
        ConfigurationError: there is no auth string, or no host.
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
