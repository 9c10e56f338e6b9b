"""What a run says when it ends badly: the first cause, and the command that goes on from there."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


@contextmanager
def reported(resume_command: str | None) -> Iterator[None]:
    """Print the failure of a worker, of Ray or of a file (a full disk) instead of a traceback, which the log has; the
    block is left, and the caller returns an error.

    Args:
        resume_command: printed below the cause, where there is something to resume.
    """
    from envs.base import EnvError
    from scheduler.channel import ChannelTimeout
    from scheduler.cluster import RayFailed
    from scheduler.worker import WorkerFailed

    try:
        yield
    except (WorkerFailed, EnvError, RayFailed, ChannelTimeout, OSError) as error:
        logger.info("ended", exc_info=True)
        print(f"\n{error}", file=sys.stderr)
        if isinstance(error, WorkerFailed):
            print(f"\nThe run ended because {error.worker} {error.summary}.", file=sys.stderr)
        _advise(resume_command)
    except KeyboardInterrupt:
        _advise(resume_command)
        raise


def _advise(resume_command: str | None) -> None:
    if resume_command:
        print(f"Resume with: {resume_command}", file=sys.stderr, flush=True)
