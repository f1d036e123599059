"""What a failed request to the hub means, and what the person can do about it."""

from __future__ import annotations

from collections.abc import Callable

from flashdreams.core.checkpoint.errors import CheckpointError


def explain(error: Exception, repo: str, revision: str, name: str = "") -> CheckpointError:
    """The sentence for an exception of the hub's library, of any of its versions' transports."""
    if isinstance(error, (ImportError, AttributeError, TypeError)):
        raise error  # a fault of the program, not of the network
    from huggingface_hub import constants, get_token
    from huggingface_hub import errors as hub

    what = f"{repo}/{name}" if name else repo
    page = f"{constants.ENDPOINT}/{repo}"
    status = getattr(getattr(error, "response", None), "status_code", None)
    sign_in = (
        "the token in use may not see it (another one goes into HF_TOKEN)"
        if _token(get_token)
        else "no token is set: log in with `hf auth login`, or put one into HF_TOKEN"
    )
    if isinstance(error, hub.OfflineModeIsEnabled):
        text = f"{what} is not in the cache folder, and HF_HUB_OFFLINE forbids the network; unset it, or copy the cache"
    elif isinstance(error, hub.GatedRepoError):
        text = f"{repo} is gated: accept its terms at {page}, then try again; {sign_in}"
    elif isinstance(error, hub.RevisionNotFoundError):
        text = f"{repo} has no revision {revision!r}; see {page}/tree/main for its branches"
    elif isinstance(error, hub.RemoteEntryNotFoundError):
        text = f"{repo} has no file {name!r} at {revision!r}; see {page}/tree/{revision}"
    elif isinstance(error, hub.RepositoryNotFoundError):
        text = f"there is no model repository {repo}, or it is private; check the spelling, and if it is: {sign_in}"
    elif status == 401:
        text = f"the hub wants to know who asks for {what} (status 401); {sign_in}"
    elif status == 403:
        text = f"access to {what} is forbidden (status 403); look at {page}: {sign_in}"
    elif status == 429:
        text = f"the hub takes no more requests for now ({what}, status 429); wait some minutes, or log in: {sign_in}"
    elif status is not None:
        text = f"the hub answered {what} with status {status}; try again later"
    else:
        reason = error.__cause__ if isinstance(error, hub.LocalEntryNotFoundError) and error.__cause__ else error
        nested = getattr(getattr(reason, "response", None), "status_code", None)
        if nested is not None and isinstance(reason, Exception):
            return explain(reason, repo, revision, name)
        said = " ".join(str(reason).split())[:200] or type(reason).__name__
        text = (
            f"{what} could not be fetched from {constants.ENDPOINT} ({said}); check the network, a proxy and "
            "HF_ENDPOINT, and run again: what has arrived is kept"
        )
    return CheckpointError(text)


def is_unreachable(error: Exception) -> bool:
    """Whether the hub gave no answer at all, or one about its own health, so that a cached copy may serve."""
    from huggingface_hub import errors as hub

    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return status in (408, 429) or status >= 500
    return not isinstance(error, (hub.HfHubHTTPError, hub.HFValidationError))


def _token(get_token: Callable[[], str | None]) -> bool:
    try:
        return bool(get_token())
    except OSError:  # a token file that cannot be read
        return False
