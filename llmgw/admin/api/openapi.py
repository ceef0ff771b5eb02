"""`/openapi.json`: the document of the API, made from the very table that routes requests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from llmgw import __version__
from llmgw.admin.calls import Call, Reply, Route

_PARAMETER: Final = re.compile(r"<(?:[a-z]+:)?([a-z_]+)>")
_ERROR: Final = {"description": "An error", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}


def routes(others: Sequence[Route]) -> tuple[Route, ...]:
    async def show(call: Call) -> Reply:
        return Reply(document)

    own = Route("GET", "/api/v1/openapi.json", show, "This document")
    document = openapi((*others, own))
    return (own,)


def openapi(table: Sequence[Route]) -> dict[str, Any]:
    """An OpenAPI 3.1 document of these routes."""
    paths: dict[str, dict[str, Any]] = {}
    for route in table:
        path = _PARAMETER.sub(r"{\1}", route.rule)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route)
    error = {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": "string"},
                    "faults": {"type": "array", "items": {"type": "object"}},
                },
            }
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "llmgw admin API", "version": __version__},
        "paths": paths,
        "components": {"schemas": {"Error": error}, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(route: Route) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in _PARAMETER.findall(route.rule)
    ]
    parameters += [{"name": name, "in": "query", "description": text, "schema": {"type": "string"}} for name, text in route.query.items()]
    if route.is_order:
        parameters.append({"name": "Idempotency-Key", "in": "header", "schema": {"type": "string"}})
    operation: dict[str, Any] = {
        "operationId": f"{route.method.lower()} {route.rule}",
        "summary": route.summary,
        "parameters": parameters,
        "responses": {"200": {"description": "Done"}, "default": _ERROR},
        "security": [] if route.role is None else [{"token": []}],
        "x-role": None if route.role is None else route.role.value,
    }
    if route.body:
        properties = {name: {"description": text} for name, text in route.body.items()}
        operation["requestBody"] = {"content": {"application/json": {"schema": {"type": "object", "properties": properties}}}}
    return operation
