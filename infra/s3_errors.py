"""Errors of S3 requests: which of them are worth another try, and what the user is told of the others."""

from __future__ import annotations

import botocore.exceptions as aws
from urllib3.exceptions import HTTPError

from schemas.errors import OpdError, StoreError

BROKEN_BODY = (
    aws.HTTPClientError, aws.IncompleteReadError, aws.FlexibleChecksumError, HTTPError, OSError,
)  # fmt: skip
_PASSING = (*BROKEN_BODY, aws.ConnectionError)
_PASSING_CODES = {
    "ConditionalRequestConflict", "OperationAborted", "RequestTimeout", "SlowDown", "Throttling", "ThrottlingException",
    "RequestLimitExceeded", "TooManyRequests", "BadDigest", "XAmzContentChecksumMismatch",
}  # fmt: skip
_CREDENTIAL_CODES = {"InvalidAccessKeyId", "ExpiredToken", "InvalidToken", "AccessDenied", "Forbidden", "403"}
CHECKSUM_ADVICE = "AWS_REQUEST_CHECKSUM_CALCULATION=when_required (request_checksum_calculation=when_required)"


class Replaced(Exception):
    """The object became another one while it was being read."""


class Refused(StoreError):
    """A refusal of the service, with what it said, for callers that can answer to it."""

    def __init__(self, status: int, code: str, where: str, expected: str, found: str, advice: str) -> None:
        super().__init__(where, expected=expected, found=found, safe="every object written so far",
                         next_command=advice)  # fmt: skip
        self.status, self.code = status, code

    def __reduce__(self):
        plain = StoreError(self.where, expected=self.expected, found=self.found, safe=self.safe,
                           next_command=self.next_command)  # fmt: skip
        return plain.__reduce__()


def passes(error: Exception) -> bool:
    """Whether the same request may well succeed a little later."""
    if isinstance(error, aws.ClientError):
        status = error.response["ResponseMetadata"]["HTTPStatusCode"]
        return (
            error.response["Error"]["Code"] in _PASSING_CODES
            or status in (409, 429)
            or (status >= 500 and status != 501)
        )
    return isinstance(error, (*_PASSING, Replaced)) and not isinstance(error, aws.SSLError)


def explained(error: Exception, where: str, bucket: str, endpoint: str, waited: float) -> OpdError:
    """What went wrong, for the user; a `Refused` where the service answered with a status. waited: in seconds."""
    if isinstance(error, (aws.NoCredentialsError, aws.PartialCredentialsError, aws.CredentialRetrievalError)):
        return StoreError(where, expected="AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile",
                          found=str(error), next_command="set them, then opd doctor")  # fmt: skip
    if not isinstance(error, aws.ClientError):
        return StoreError(where, expected=f"an answer from {endpoint} (AWS_ENDPOINT_URL)",
                          found=f"{error}, tried for {waited:.0f} s", safe="every object written so far",
                          next_command="opd doctor; once it answers, the same command again")  # fmt: skip
    status, code = error.response["ResponseMetadata"]["HTTPStatusCode"], error.response["Error"]["Code"]
    found = f"{status} {code}: {error.response['Error'].get('Message', '')} from {endpoint}"
    expected, advice = "the service to do as asked", "opd doctor"
    if code == "NoSuchBucket":
        where, expected, advice = f"s3://{bucket}", "a bucket", "create it, or correct the data setting"
    elif code == "RequestTimeTooSkewed":
        expected, advice = "a clock that agrees with the service's", "set this machine's clock"
    elif code == "SignatureDoesNotMatch":
        expected = "a signature that the service accepts"
        advice = f"correct AWS_SECRET_ACCESS_KEY; for services that cannot check checksums, {CHECKSUM_ADVICE}"
    elif code in ("PermanentRedirect", "AuthorizationHeaderMalformed"):
        expected, advice = "the bucket's own region", "correct AWS_DEFAULT_REGION"
    elif code in _CREDENTIAL_CODES:
        # The answer to a HEAD has no body: a wrong secret and a right that is missing look the same there.
        expected = "credentials that may read and write here"
        advice = "correct AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY or the rights that go with them"
    elif status in (400, 411, 501) and error.operation_name in ("PutObject", "CreateMultipartUpload", "UploadPart"):
        expected = "a service that takes PUT with a checksum and with If-None-Match, and multipart uploads"
        advice = f"{CHECKSUM_ADVICE} if it cannot do checksums; then opd doctor"
    return Refused(status, code, where, expected, found, advice)
