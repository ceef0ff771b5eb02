"""`/models`: what is asked for. Bodies are the `[[model]]` tables of the file."""

from __future__ import annotations

from typing import Any

from llmgw.admin.calls import PAGED, Call, Reply, Route, page
from llmgw.admin.views import model_table, model_view, node_names, replica_view
from llmgw.control.catalog import Change
from llmgw.control.controller import Controller
from llmgw.domain.errors import Fault, Invalid
from llmgw.domain.model import ModelSpec
from llmgw.settings.objects import read_model
from llmgw.store.admin_tokens import Role

APPLY_MAX = 10_000  # tables of one apply


def routes(controller: Controller) -> tuple[Route, ...]:
    models = controller.models

    def view(spec: ModelSpec) -> dict[str, Any]:
        reason = controller.reconciler.reasons.get(f"model/{spec.name}")
        choice = models.choices.get(spec.name)
        return model_view(spec, models.revision(spec.name), choice, controller.replicas(), controller.publisher.current, reason)

    def changed(change: Change) -> Reply:
        return Reply(
            {**change_view(change), "revision": change.revision, "durability": models.durability},
            201 if change.change == "created" else 200,
            {"ETag": f'"{change.revision}"'},
        )

    async def list_(call: Call) -> Reply:
        return page(call, "models", list_models(controller), "name")

    async def one(call: Call, name: str) -> Reply:
        spec = models.get(name)
        revision = models.revision(spec.name)
        wall_s = controller.machine.wall_s()
        names = node_names(controller.observe().nodes)
        replicas = [
            replica_view(replica, names.get(replica.node, replica.node), wall_s)
            for replica in controller.replicas()
            if replica.model == spec.name
        ]
        table = model_table(spec, secrets=call.principal.may(Role.OPERATOR))
        return Reply({**view(spec), "model": table, "replicas": replicas}, headers={"ETag": f'"{revision}"'})

    async def put(call: Call, name: str) -> Reply:
        spec = read_one(call.table(), name)
        current = models.revision(name) if models.catalog.get(name) is not None else 0
        return changed(await models.put(spec, call.expected_revision(current), call.key, call.origin))

    async def apply(call: Call) -> Reply:
        body = call.table(("models", "dry_run"))
        specs = read_many(body.get("models"))
        dry_run = body.get("dry_run", False)
        if not isinstance(dry_run, bool):
            raise Invalid("dry_run is true or false", param="dry_run")
        changes = await models.plan_apply(specs) if dry_run else await models.apply(specs, call.key, call.origin)
        revision = max((change.revision for change in changes), default=0)
        return Reply(
            {
                "changes": [change_view(change) for change in changes],
                "revision": revision,
                "dry_run": dry_run,
                "durability": models.durability,
            }
        )

    async def remove(call: Call, name: str) -> Reply:
        there = models.catalog.get(name) is not None
        expected = call.expected_revision(models.revision(name)) if there else None  # of a model that is not there: 404, whatever it named
        revision = await models.remove(name, expected, call.key, call.origin)
        return Reply({"model": name, "change": "removed", "revision": revision, "durability": models.durability})

    async def scale(call: Call, name: str) -> Reply:
        count = call.table(("count",)).get("count")
        if type(count) is not int:
            raise Invalid("count is a whole number", param="count")
        return changed(await models.scale(name, count, call.key, call.origin))

    async def engine(call: Call, name: str) -> Reply:
        profile = call.table(("profile",)).get("profile")
        if profile is not None and not isinstance(profile, str):
            raise Invalid("profile is the name of one of the model's profiles, or null for the first by priority", param="profile")
        in_force = await models.choose_engine(name, profile, call.origin)
        return Reply({"model": models.get(name).name, "profile": in_force, "change": "updated", "revision": models.revision(name)})

    async def restart(call: Call, name: str) -> Reply:
        touched = await controller.restart_model(name, call.origin)
        spec = models.get(name)
        return Reply({"model": spec.name, "change": "restarting", "replicas": list(touched), "revision": models.revision(spec.name)}, 202)

    table = {"(the table)": "a [[model]] table"}
    operator = Role.OPERATOR
    return (
        Route("GET", "/api/v1/models", list_, "Every model: wanted, ready, state and reason", query=PAGED),
        Route("POST", "/api/v1/models:apply", apply, "Add or replace these models, and leave the others alone", operator,
              {"models": "[[model]] tables", "dry_run": "true: only say what would change"}),
        Route("GET", "/api/v1/models/<name:name>", one, "One model with its table and replicas; its ETag is its revision"),
        Route("PUT", "/api/v1/models/<name:name>", put, "Add (If-None-Match: *) or replace (If-Match) a model", operator, table),
        Route("DELETE", "/api/v1/models/<name:name>", remove, "Remove a model: its endpoints first, then its replicas", operator),
        Route("POST", "/api/v1/models/<name:name>/scale", scale, "How many replicas run now", operator, {"count": "replicas"}),
        Route("POST", "/api/v1/models/<name:name>/engine", engine, "Which profile runs", operator, {"profile": "its name, or null"}),
        Route("POST", "/api/v1/models/<name:name>/restart", restart, "Replace the replicas one at a time; start failed ones", operator),
    )  # fmt: skip


def list_models(controller: Controller) -> list[dict[str, Any]]:
    """Every model's view, sorted by name."""
    replicas = controller.replicas()
    by_model: dict[str, list[Any]] = {}
    for replica in replicas:
        by_model.setdefault(replica.model, []).append(replica)
    models = controller.models
    return [
        model_view(
            spec,
            models.revision(spec.name),
            models.choices.get(spec.name),
            by_model.get(spec.name, ()),
            controller.publisher.current,
            controller.reconciler.reasons.get(f"model/{spec.name}"),
        )
        for spec in models.catalog.models
    ]


def read_one(table: dict[str, Any], name: str) -> ModelSpec:
    """The table as a model; the name in the path holds where the table has none. Raises Invalid with every fault."""
    if table.setdefault("name", name) != name:
        raise Invalid(f"the path names model {name[:100]!r}, the table another", param="name")
    faults: list[Fault] = []
    spec = read_model(table, "model", faults)
    if spec is None:
        raise Invalid.of("the model is not valid", tuple(faults))
    return spec


def read_many(raw: Any) -> tuple[ModelSpec, ...]:
    """The tables of an apply. Raises Invalid with every fault of all of them."""
    if not isinstance(raw, list) or not raw:
        raise Invalid("models is a list of at least one [[model]] table", param="models")
    if len(raw) > APPLY_MAX:
        raise Invalid(f"at most {APPLY_MAX} models may be applied at once", param="models")
    faults: list[Fault] = []
    found = [read_model(table, f"models[{index}]", faults) for index, table in enumerate(raw)]
    if faults:
        raise Invalid.of("the models are not valid", tuple(faults))
    return tuple(spec for spec in found if spec is not None)


def change_view(change: Change) -> dict[str, Any]:
    return {
        "model": change.model,
        "change": change.change,
        "diff": [{"path": path, "before": before, "after": after} for path, before, after in change.diff],
    }
