"""Slots of other hosts, in memory and on disk, which their keepers serve (go/keeper)."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from torchft._lighthouse_http import HttpLighthouse, Unanswered, direct, refusal_of, token_headers
from torchft.addresses import is_loopback
from torchft.checkpointing.snapshots.reading import Source
from torchft.checkpointing.snapshots.shares import WHOLE, Share
from torchft.checkpointing.snapshots.slots import Header, SlotError

# Keepers report every 2 s, so one that a lighthouse has not heard of within this time has nothing to say.
_ALL_HEARD_SEC = 2.5
_ANSWER_SEC = 5.0
# How long a keeper may take to say what it holds, and how many are asked at a time. The lighthouse does not
# list one that it has not heard of for as long.
_LIST_SEC, _AT_ONCE = 10.0, 32
_SILENT_SEC = 10.0  # a keeper that sends nothing for as long is given up


class Held(NamedTuple):
    """A slot that a keeper holds.

    Attributes:
        header: as far as the keeper tells it.
        source: reads it.
    """

    header: Header
    source: Source


def held(lighthouse: str, job: str, say: Callable[[str], None] = lambda text: None) -> list[Held]:
    """Returns the complete slots of a job on all hosts, the newest first.

    The lighthouse knows the keepers, and what each has told it in the last seconds. That may be older than
    the end of the trainers before, so each keeper is asked what it holds. One that does not answer has
    nothing: a group that announced its copy, and could not load it, would have let the job begin before it.

    Args:
        lighthouse: its addresses, separated by commas.
        job: name under which the ranks keep slots.
        say: called with the reason for each keeper that does not answer, or not as this version's does.

    Raises:
        SlotError: no lighthouse answers, or not as this version's does.
    """
    asked = HttpLighthouse(lighthouse, timeout=_ANSWER_SEC)
    # All keepers of this host have told a lighthouse of this host already, or are not needed.
    elsewhere = not all(is_loopback(urlsplit(one).hostname or "") for one in asked.addresses)
    until = time.monotonic() + (_ALL_HEARD_SEC if elsewhere else 0.0)
    while True:
        try:
            answer = asked.get("/api/v1/keepers")
            keepers, listening_ms = answer["keepers"], answer["listening_ms"]
        except (Unanswered, ValueError) as error:
            if time.monotonic() >= until:
                raise SlotError(f"snapshots on other hosts are not found: {error}") from None
        except (KeyError, TypeError) as error:
            raise SlotError(
                "snapshots on other hosts are not found: the lighthouse is of another version, its answer "
                f"lacks {error}"
            ) from None
        else:
            missing = _ALL_HEARD_SEC - listening_ms / 1000
            if missing <= 0 or time.monotonic() >= until:
                return _of_all(keepers, job, say)
        time.sleep(0.1)


def _of_all(keepers: Sequence[dict[str, Any]], job: str, say: Callable[[str], None]) -> list[Held]:
    """Asks keepers what they hold at this moment."""

    def ask(keeper: dict[str, Any]) -> list[Held]:
        try:
            return [
                _held(keeper["address"], slot)
                for slot in _listed(keeper["address"])
                if slot["job"] == job and not slot.get("incomplete")
            ]
        except SlotError as error:
            say(f"the copies of {keeper.get('host')} are not found, its keeper does not answer: {error}")
        except (KeyError, TypeError, AttributeError) as error:
            say(
                f"the copies of {keeper.get('host')} are not found: its keeper is of another version, its "
                f"answer lacks {error}"
            )
        return []

    if not keepers:
        return []
    with ThreadPoolExecutor(min(len(keepers), _AT_ONCE), thread_name_prefix="torchft_keepers") as threads:
        found = [slot for of_one in threads.map(ask, keepers) for slot in of_one]
    return sorted(found, key=lambda one: (-one.header.step, -one.header.quorum, one.source.where))


def _held(address: str, slot: dict[str, Any]) -> Held:
    names = ("job", "group", "group_rank", "group_world_size", "step", "quorum", "saved")
    share = Share(*slot["share"]) if slot.get("share") else WHOLE
    header = Header(**{name: slot[name] for name in names}, batches=0, share=share)
    url = f"{address}/snapshots/{quote(header.job, safe='')}/{quote(slot['path'])}"
    return Held(header, Source(url, partial(_opened, url, address)))


def _listed(address: str) -> Any:
    try:
        with _request(f"{address}/snapshots", address, _LIST_SEC) as response:
            return json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise SlotError(f"{address}: {getattr(error, 'reason', error)}") from None


def _opened(url: str, address: str, offset: int, length: int) -> Any:
    return _request(url, address, _SILENT_SEC, Range=f"bytes={offset}-{offset + length - 1}")


def _request(url: str, address: str, timeout: float, **headers: str) -> Any:
    """Opens a request to a keeper. SlotError: it refuses. OSError: it does not answer."""
    request = urllib.request.Request(url, headers={**token_headers(), **headers})
    try:
        return direct(address).open(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        with error:
            raise SlotError(str(refusal_of(url, error.code, error.read()))) from None
