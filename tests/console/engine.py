"""The stream engine of the chaos tests, with a log that grows: a hostile first line (unless `--quiet-start`),
then a line every 200 ms that names its port."""

from __future__ import annotations

import runpy
import sys
import threading
import time
from pathlib import Path

HOSTILE = "<img src=x onerror=alert(1)>"
LINE_S = 0.2


def write_lines(port: str) -> None:
    number = 0
    while True:
        number += 1
        print(f"\x1b[32mline\x1b[0m {number} of {port} {'.' * 60}", flush=True)
        time.sleep(LINE_S)


if __name__ == "__main__":
    if "--quiet-start" not in sys.argv:
        print(HOSTILE, flush=True)
    threading.Thread(target=write_lines, args=(sys.argv[sys.argv.index("--port") + 1],), daemon=True).start()
    runpy.run_path(str(Path(__file__).parent.parent / "chaos" / "stream_engine.py"), run_name="__main__")
