"""What each client of S3 is told, from the standard AWS_* environment: boto3, delta-rs and Spark's S3A."""

from __future__ import annotations

import math
import os

import botocore.exceptions as aws
from boto3.session import Session

from infra.store import patience_seconds
from schemas.errors import ConfigError, without_credentials


def client_settings() -> dict[str, str]:
    """Endpoint, region and credentials as boto3 finds them (environment, profile, role), and patience, for delta-rs.

    The former under their AWS_* names; secrets included, so never for a log. Raises ConfigError for a profile that is
    not there.
    """
    # By itself it gives up after ten tries: two seconds, where a connection is refused.
    settings = {"max_retries": "1000", "retry_timeout": f"{patience_seconds():g}s"}
    if endpoint := s3_endpoint():
        # Services of a private network often speak plain HTTP, which clients refuse unless told.
        settings |= {"AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true"}
    try:
        session = Session()
        credentials = session.get_credentials()
    except aws.BotoCoreError as error:
        raise ConfigError(
            "AWS settings of the environment", expected="settings that boto3 takes", found=str(error)
        ) from error
    if session.region_name:
        settings["AWS_REGION"] = session.region_name
    if credentials is not None:
        found = credentials.get_frozen_credentials()
        names = {"AWS_ACCESS_KEY_ID": found.access_key, "AWS_SECRET_ACCESS_KEY": found.secret_key,
                 "AWS_SESSION_TOKEN": found.token}  # fmt: skip
        settings |= {name: value for name, value in names.items() if value}
    return settings


def s3_endpoint() -> str | None:
    """URL of the S3 service by the standard environment; None stands for AWS itself.

    ConfigError for one with a user's name and password: no S3 client sends them, and all print them.
    """
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None
    if endpoint is not None and without_credentials(endpoint) != endpoint:
        raise ConfigError(
            "environment AWS_ENDPOINT_URL", expected="http(s)://HOST[:PORT]",
            found=f"{endpoint}, with a user's name and password before it",
            next_command="give keys by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, then the same command again",
        )  # fmt: skip
    return endpoint


def s3a_options() -> dict[str, str]:
    """S3A by the AWS_* environment that boto3 reads. Credentials go from it to the JVM, never into an option."""
    endpoint = s3_endpoint()
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    options = {
        "aws.credentials.provider": "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider",
        "create.conditional.enabled": "true",
        # Pauses double from half a second: together they are about as long as the store's patience.
        "retry.limit": str(round(math.log2(2 * patience_seconds() + 1))),
        # Bucket names in the host name need DNS entries that services of one's own seldom have.
        **({"endpoint": endpoint, "path.style.access": "true"} if endpoint else {}),
        **({"endpoint.region": region} if region else {}),
    }
    return {
        "spark.delta.logStore.s3a.impl": "opd.ConditionalLogStore",
        **{f"spark.hadoop.fs.s3a.{name}": value for name, value in options.items()},
    }
