"""The device status word: what a kernel found wrong, told without a host read.

A kernel that meets a malformed request empties that request and records the first such finding in
`status`, int32 `[4] = (code, request, row, value)`, by a compare-and-swap on the code. The word is sticky
until somebody who can afford a host read asks for it; `status_error` turns it into a sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum


class Status(IntEnum):
    """Codes of a status word; `row` and `value` mean what `MESSAGES` says for the code."""

    OK = 0
    PARENT = 1
    NUM_NODES = 2
    MASK_HOLE = 3
    QO_INDPTR = 4
    KV_CAPACITY = 5
    PREFIX_LEN = 6
    MASK_SIZE = 7
    BIAS_VALUE = 8
    MASK_INDPTR = 9
    WORK = 10


MESSAGES: dict[Status, str] = {
    Status.PARENT: (
        "request {request}: row {row} has parent {value}; the root is row 0 with parent -1, "
        "every other row's parent is an earlier row of the same request"
    ),
    Status.NUM_NODES: "request {request}: num_nodes is {value}, but its q_len is {row}",
    Status.MASK_HOLE: (
        "request {request}: row {row} hides prefix token {value}; every real row must see the whole prefix"
    ),
    Status.QO_INDPTR: (
        "request {request}: qo_indptr goes from {row} to {value}; it must start at 0, never fall, "
        "stay inside the rows there are, and no request may be wider than max_q_len"
    ),
    Status.KV_CAPACITY: ("request {request}: needs {value} cache entries, its part of the KV address table has {row}"),
    Status.PREFIX_LEN: "request {request}: prefix_len is {value} (or beyond), must be 0 or more and an int32",
    Status.MASK_SIZE: (
        "request {request}: its block of the flat mask ends at {value}, the mask has {row} elements (words: bits a row)"
    ),
    Status.BIAS_VALUE: (
        "request {request}: row {row} has a bias at key {value} that is neither 0 (visible) "
        "nor masked (-inf or a large negative number)"
    ),
    Status.WORK: (
        "the batch's lengths add up to {value} x 1024 tiles of work, the plan counts to {row}: a length is wrong"
    ),
    Status.MASK_INDPTR: "request {request} starts at {value}, must be {row}",
}


def status_message(status: Sequence[int]) -> str:
    """Write the sentence for a status word `(code, request, row, value)`."""
    code, request, row, value = (int(x) for x in status)
    known = {int(s) for s in Status}
    if code not in known or code == Status.OK:
        return f"status {code}: request {request}, row {row}, value {value}"
    name = Status(code)
    return f"{name.name}: " + MESSAGES[name].format(request=request, row=row, value=value)


def status_error(status: Sequence[int]) -> ValueError:
    """Make a ValueError that names request, row and value of a status word."""
    return ValueError(status_message(status))


def raise_status(status: Sequence[int]) -> None:
    """Raise `status_error` when the word's code is not `Status.OK`."""
    if int(status[0]) != Status.OK:
        raise status_error(status)
