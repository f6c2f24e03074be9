"""Where the command `poolgate` begins: before the imports, which take half a second."""

from __future__ import annotations

import signal


def main() -> None:
    # A Ctrl-C while Python still imports ends the process without a traceback: nothing was started yet. Commands that
    # start something set handlers of their own. One that came in as ignored (nohup) stays so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from gateway.cli import main as run

    run()
