"""Opens a bucket: the one place that says how every client of ours speaks to an object store. Asks nobody for anything."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from obstore.store import S3Store

from llmgw.settings.object_place import ObjectPlace

if TYPE_CHECKING:
    from obstore.store import S3Credential


def open_bucket(place: ObjectPlace, folder: str, timeout: timedelta) -> S3Store:
    """Names are below `folder` of the place's prefix; `timeout` ends a request. The client repeats nothing by itself.

    Raises Invalid for credentials that are not there; they are read once, so another client is needed for other ones.
    """
    credentials = place.read_credentials()

    def provide() -> S3Credential:
        return {
            "access_key_id": credentials.access_key_id,
            "secret_access_key": credentials.secret_access_key,
            "token": credentials.session_token or None,
            "expires_at": None,
        }

    # Everything that AWS_* variables would decide in its stead is said. A provider, since a plain key would be joined with a
    # session token from the environment that is not its own.
    return S3Store(
        place.bucket,
        prefix=place.key(folder),
        aws_endpoint_url_s3=place.endpoint,  # comes before `endpoint`, which the environment's would come before
        region=place.region,
        credential_provider=provide,
        virtual_hosted_style_request=False,
        skip_signature=False,
        s3_express=False,
        conditional_put="etag",
        disable_bulk_delete=True,  # one name, by the request that every store knows
        client_options={
            "allow_http": place.endpoint.startswith("http://"),
            "timeout": timeout,
            "connect_timeout": timeout,
        },
        retry_config={"max_retries": 0},
    )
