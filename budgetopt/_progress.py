"""What a command is doing, in one line on stderr, if someone is looking."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """Show `what` until the end; what is yielded takes the names of the stages. Quiet where stderr is no terminal."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda stage: None
        return
    # Without auto_refresh: the thread that turns a spinner would take time from the step that is being measured.
    with Live(Text(f"{what} …"), console=console, auto_refresh=False, transient=True) as live:
        live.refresh()
        yield lambda stage: live.update(Text(f"{what}: {stage} …"), refresh=True)
