"""Answer a question once: results that are there are not made again, and nothing else ever loses its place to them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from lewm.errors import FileError
from lewm.evaluate.journal import Journal
from lewm.evaluate.question import Question
from lewm.files import RESULTS, check_output, leaving_no_empty_folders, only_writer, read_json


def is_answered(out: Path, question: Question) -> bool:
    """Whether the file ``out`` has the results of this very question. Any other file is refused."""
    check_output(out, RESULTS)
    if not out.exists() or not out.stat().st_size:
        return False
    document = read_json(out)
    if isinstance(document, dict) and document.get("question") == question.digest:
        return True
    remedy = f"It stays as it is; write these to another place, such as {out.with_name(question.name)}.json"
    raise FileError(f"{out} has the results of another evaluation: other model, pairs, settings or versions. {remedy}.")


@contextlib.contextmanager
def answering(out: Path, question: Question) -> Iterator[Journal | None]:
    """The notes of an evaluation whose results will be the file ``out``, beside it; None if they are there already.

    Nobody else writes there meanwhile. An interruption leaves the notes, from which the same question goes on; whoever
    has written the results removes them.
    """
    lock, notes = (out.with_name(f"{out.name}.{suffix}") for suffix in ("lock", "partial"))
    if is_answered(out, question):
        if notes.exists() or lock.exists():  # of one that was killed at its last word
            with contextlib.suppress(FileError), only_writer(lock, ""):
                Journal(notes, question.facts).remove()
        yield None
        return
    busy = f"Another evaluation is writing {out}. Wait for it, or name other results with --out."
    with leaving_no_empty_folders(out.parent), only_writer(lock, busy):
        if is_answered(out, question):  # by one that has just ended
            yield None
            return
        with contextlib.closing(Journal(notes, question.facts)) as journal:
            yield journal
